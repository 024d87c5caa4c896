"""Failure domains: labels are checked, and reach the coordinator; more in test_fleet.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.engine.core.domains import has_other_keys, join_labels, read_domains
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.membership.agent import AgentMachine, AgentPolicy, Labelled, SendReport
from holdfast.engine.core.membership.live_roster import LiveRoster, News
from holdfast.engine.core.membership.roster import describe_nodes
from holdfast.engine.core.types import AgentId, Incarnation


def test_labels_are_sorted_by_key() -> None:
    assert read_domains(["zone=a", "rack=r7", "rack=r7"]) == ("rack=r7", "zone=a")
    assert read_domains([]) == ()


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (["rack"], "failure domain 'rack': write it as KEY=VALUE"),
        (["=r7"], "'=r7'"),
        (["rack="], "'rack='"),
        (["rack=" + "x" * 300], "write it as KEY=VALUE"),
        (["rack=a", "rack=b"], "'rack=a' and 'rack=b': a node is in one rack"),
        ([f"k{i}=v" for i in range(9)], "9 failure domains: a node has at most 8"),
    ],
)
def test_bad_labels_are_refused(labels: list[str], text: str) -> None:
    with pytest.raises(UserError, match="failure domain") as caught:
        read_domains(labels)
    assert text in str(caught.value)


def test_labels_that_a_person_gives_win_over_those_of_the_manager() -> None:
    assert join_labels(("rack=a", "zone=z"), ("rack=b",)) == ("rack=b", "zone=z")
    assert has_other_keys((), ("rack=a",))
    assert not has_other_keys(("rack=b", "zone=z"), ("rack=a",))


def test_an_agent_reports_its_domains_at_once_and_the_coordinator_shows_them() -> None:
    agent = AgentMachine(AgentId("a"), Incarnation(1), 1, AgentPolicy(heartbeat_s=1.0))
    agent.handle(Labelled(()), 0.0)
    [effect] = agent.handle(Labelled(("rack=r7",)), 0.1)
    assert isinstance(effect, SendReport)
    assert not agent.handle(Labelled(("rack=r7",)), 0.2)
    roster = LiveRoster(None, 0.0)
    assert roster.hear(effect.report, 0.3) is News.CHANGE
    assert [node.domains for node in describe_nodes(roster, ())] == [("rack=r7",)]


def test_a_launch_takes_no_domain_for_all_its_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    argv = ["launch", "local", "--domain", "rack=r7", str(script)]
    assert main(argv) != 0
    assert "--domain rack=r7: the cluster manager says" in capsys.readouterr().err
