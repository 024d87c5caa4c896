"""Finds the recovery times of a job, for one choice of settings at one point of the inputs.

Missing workers, pieces in memory and leases cost what they cost the shipped machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.engine.core.replica.intervals import chance_of_losing_pieces
from holdfast.plan.failure_tables import DAY_S, Effect
from holdfast.plan.recovery import (
    JOIN_STEPS,
    LEASES_TO_LOSS,
    NO_STANDSTILL,
    RecoveryTimes,
    Standstill,
)
from holdfast.plan.scenario import Choice, Point, Scenario

MONTH_S = 30 * DAY_S
#: How much rarer silences of a healthy node are that last k times as long: 1 / k**2.
SILENCE_POWER = 2
#: A node that leaves after these hands its state over first.
ANNOUNCED = (Effect.PLANNED, Effect.WAVE, Effect.SLOW)


def make_recovery(scenario: Scenario, choice: Choice, point: Point = Point.MIDDLE) -> RecoveryTimes:
    """Return the recovery times of the job under a choice."""
    return FailingJob(scenario=scenario, choice=choice, point=point).make()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingJob:
    """Is a job under a choice, with one value of each interval."""

    scenario: Scenario
    choice: Choice
    point: Point

    def find_rates(self) -> dict[Effect, float]:
        """Return the failures of the job in a second, by effect."""
        nodes, model = self.scenario.working_nodes(self.choice), self.scenario.model
        node_rate = self.point.of(model.per_node_s(self.scenario.cluster.gpus_per_node))
        found = {e: nodes * node_rate * model.share(e) for e in Effect}
        if not self.scenario.cluster.domain_nodes:
            found[Effect.NODE] += found.pop(Effect.DOMAIN)
        silences = self.point.of(self.scenario.costs.silences) / DAY_S * nodes
        found[Effect.PROCESS] += silences * self.choice.lease_s**-SILENCE_POWER
        found[Effect.WAVE] += self.point.of(model.waves) / DAY_S
        found[Effect.OUTAGE] += self.point.of(self.scenario.costs.outages) / MONTH_S
        return {e: rate for e, rate in found.items() if rate > 0 and e is not Effect.SILENT}

    def make(self) -> RecoveryTimes:
        """Return the recovery times of the job."""
        scenario, choice = self.scenario, self.choice
        nodes, copy_s = scenario.working_nodes(choice), scenario.copy_s(choice)
        rates = self.find_rates()
        returns = {e: self._chance_of_return(e, rates) for e in rates}
        opening_s = self.point.of(scenario.costs.find_opening_s(scenario.cluster.gpus))
        start_s, replace_s = self.point.of(scenario.costs.start_s), self._replace_s()
        is_one = scenario.count_workers(choice) == 1
        ready_s = start_s if is_one else start_s + self._feed_s()
        back = {Effect.PROCESS: ready_s, Effect.HANG: ready_s}
        for effect in (Effect.NODE, Effect.DOMAIN, *ANNOUNCED):
            back[effect] = replace_s + (0.0 if is_one else ready_s)
        return RecoveryTimes(
            workers=self._count_units(),
            rates=rates,
            lost=self._find_lost(),
            pauses={
                effect: Standstill(
                    detection_s=self._detection_s(effect),
                    opening_s=opening_s,
                    again_s=self._again_s(effect),
                    starting_s=self._starting_s(effect, ready_s),
                )
                for effect in rates
            },
            back_s=back,
            spare_back_s=self._spare_back_s(ready_s),
            spares=(scenario.cluster.nodes - nodes) * scenario.units_per_node,
            join=NO_STANDSTILL if is_one else Standstill(opening_s=opening_s),
            speed=self._make_speed(),
            save_every_s=choice.save_every_s,
            save_stall_s=copy_s if choice.save_every_s < math.inf else 0.0,
            protect_every_s=choice.protect_every * scenario.step_s(choice),
            protect_stall_s=copy_s if choice.redundancy.data else 0.0,
            returns={effect: chance for effect, chance in returns.items() if chance > 0},
            reload=Standstill(starting_s=start_s + scenario.save_s(), opening_s=opening_s),
        )

    def _replace_s(self) -> float:
        if self.scenario.cluster.replace_s is None:
            return self.scenario.model.repair.mean_s
        return self.point.of(self.scenario.cluster.replace_s)

    def _starting_s(self, effect: Effect, ready_s: float) -> float:
        """Return the time that a worker on several nodes takes to start, as lost time of all."""
        is_ended = effect not in (Effect.PLANNED, Effect.WAVE, Effect.OUTAGE)
        if not self.scenario.is_spread or not is_ended:
            return 0.0
        workers = self.scenario.count_workers(self.choice)
        if effect in (Effect.NODE, Effect.DOMAIN, Effect.SLOW) and workers > 1:
            return 0.0  # its nodes are missing for that time
        left = self._make_speed()((workers - 1) * self.scenario.nodes_per_worker)
        return ready_s * (1 - left)

    def _spare_back_s(self, ready_s: float) -> float:
        if self.scenario.count_workers(self.choice) == 1:
            return 0.0  # the start is in the standstill
        if self.scenario.is_spread:  # the processes of the other nodes start again as well
            return ready_s
        return 0.0 if self.choice.hot else self._feed_s()

    def _feed_s(self) -> float:
        """Return the time until a worker that is ready has joined, while the members train."""
        return self.scenario.feed_s() + JOIN_STEPS * self.scenario.step_s(self.choice)

    def _count_units(self) -> int:
        """Return the number of workers, or of their nodes if workers lie on several nodes."""
        if self.scenario.is_spread:
            return self.scenario.working_nodes(self.choice)
        return self.scenario.count_workers(self.choice)

    def _find_lost(self) -> dict[Effect, int]:
        """Return the workers, or nodes of workers on several nodes, that a failure takes."""
        node = self.scenario.units_per_node
        found = dict.fromkeys((Effect.NODE, Effect.PLANNED, Effect.SLOW), node)
        found[Effect.WAVE] = self.scenario.model.wave_nodes * node
        found[Effect.DOMAIN] = max(self.scenario.cluster.domain_nodes, 1) * node
        if not self.scenario.is_spread:
            found |= {Effect.PROCESS: 1, Effect.HANG: 1}
        return found

    def _detection_s(self, effect: Effect) -> float:
        match effect:
            case Effect.PROCESS | Effect.OUTAGE:
                return self.point.of(self.scenario.costs.detection_s)
            case Effect.NODE | Effect.DOMAIN:
                return LEASES_TO_LOSS * self.choice.lease_s
            case Effect.HANG:
                return self.scenario.hang_s
            case _:
                return 0.0

    def _again_s(self, effect: Effect) -> float:
        """Return the training that is done again though the state is not lost."""
        if effect in (*ANNOUNCED, Effect.OUTAGE):
            return 0.0
        step_s = self.scenario.step_s(self.choice)
        if self.scenario.is_only_in_pieces(self.choice) and self.choice.redundancy.data:
            return (1 + self.choice.protect_every * self.scenario.work.replay_share) * step_s / 2
        return step_s / 2

    def _make_speed(self) -> Callable[[int], float]:
        size, most = self.scenario.nodes_per_worker, self.scenario.count_workers(self.choice)
        virtual = self.choice.tasks * most

        def find_speed(present: int) -> float:
            workers = min(present // size if self.scenario.is_spread else present, most)
            return self.choice.tasks / -(-virtual // workers) if workers > 0 else 0.0

        return find_speed

    def _chance_of_return(self, effect: Effect, rates: dict[Effect, float]) -> float:
        """Return the probability that a failure takes all copies of some of the state."""
        if effect is Effect.OUTAGE:
            return 1.0
        if effect in ANNOUNCED:
            return 0.0
        nodes = self.scenario.working_nodes(self.choice)
        domain = self.scenario.cluster.domain_nodes
        if not self.scenario.is_only_in_pieces(self.choice):
            return float(self._find_lost().get(effect, 0) >= self._count_units())
        if not self.choice.redundancy.data:
            return 1.0
        if effect in (Effect.PROCESS, Effect.HANG):  # memory is kept by the node's agent
            return 0.0
        if effect is Effect.DOMAIN:
            pieces, domains = self.choice.redundancy.pieces_on(nodes), max(nodes // domain, 1)
            return float(-(-pieces // domains) > self.choice.redundancy.parity)
        return chance_of_losing_pieces(
            self.choice.redundancy,
            nodes,
            loss_rate=rates.get(Effect.NODE, 0.0),
            window_s=self.choice.protect_every * self.scenario.step_s(self.choice),
        )
