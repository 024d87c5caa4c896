"""Logs step, loss, metrics and incidents to TensorBoard, Weights & Biases, or MLflow.

Make one of these on all workers before the loops: `TensorBoard(job, "logs")`. Only the worker that
acts for the job writes, so no step is logged twice, and a worker that leads later goes on with the
same run.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from typing import Any

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.incidents import Incident, describe_cost
from holdfast.engine.records.run_tail import RunTail
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.job_step import Step

TAG = "holdfast.job"


class Tracker(abc.ABC):
    """Is called at the end of each step, on one worker. Numbers in `step.metrics` are logged.

    Incidents come from the event log in the run directory: a node that has another run directory
    than the coordinator's logs none.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tail = RunTail(job.run_dir) if job.run_dir is not None else None
        self._known = 0  # incidents that need not be logged any more
        job.on_step_end(self)

    def __call__(self, step: Step) -> None:
        """Log one step, and the incidents that have ended since the last one."""
        numbers = {k: float(v) for k, v in step.metrics.items() if isinstance(v, (int, float))}
        self.log_step(step.index, {"loss": step.loss, **numbers})
        if self._tail is None or not self._tail.look():
            return
        incidents = self._tail.incidents
        for number in range(self._known, len(incidents)):
            if not incidents[number].cost:
                break  # it is still open
            self._known = number + 1
            self.log_incident(step.index, number + 1, incidents[number])

    @abc.abstractmethod
    def log_step(self, index: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""

    @abc.abstractmethod
    def log_incident(self, index: int, number: int, incident: Incident) -> None:
        """Log the `number`-th incident of the run, from 1 on, after the step `index`.

        A worker that begins to act for the job logs those before it once more.
        """


def name_of(job: Job) -> str:
    """Return the job's random name, the same for as long as it lives; empty without a launcher."""
    return RunDir(job.run_dir).spec().job if job.run_dir is not None else ""


def describe_ended(incident: Incident) -> str:
    """Return the title of an incident with its cost."""
    return f"{incident.title}; {describe_cost(incident)}"


class TensorBoard(Tracker):
    """Writes event files to a directory, which TensorBoard shows as one run."""

    def __init__(self, job: Job, log_dir: str | os.PathLike[str]) -> None:
        """Check that the package is there. UserError."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _make_missing_error("tensorboard") from None
        super().__init__(job)
        self._make = lambda: SummaryWriter(os.fspath(log_dir))
        self._writer: Any = None

    def log_step(self, index: int, numbers: Mapping[str, float]) -> None:
        self._writer = self._writer or self._make()
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, index)
        self._writer.flush()

    def log_incident(self, index: int, number: int, incident: Incident) -> None:
        self._writer.add_scalar("holdfast/incidents", number, index)
        self._writer.add_text("holdfast/incident", describe_ended(incident), index)
        self._writer.flush()


class WandB(Tracker):
    """Logs to a run of Weights & Biases, whose id is the job's. `settings`: for `wandb.init`."""

    def __init__(self, job: Job, **settings: Any) -> None:
        """Check that the package is there. UserError."""
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise _make_missing_error("wandb") from None
        super().__init__(job)
        self._init = wandb.init
        self._settings = {"id": name_of(job) or None, "resume": "allow", **settings}
        self._run: Any = None

    def log_step(self, index: int, numbers: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._init(**self._settings)
            # Steps of our own: a job that goes back to a checkpoint logs some again.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        self._run.log({"step": index, **numbers})

    def log_incident(self, index: int, number: int, incident: Incident) -> None:
        self._run.log({"step": index, "holdfast/incidents": number})
        self._run.summary["holdfast/last_incident"] = describe_ended(incident)


class MLflow(Tracker):
    """Logs to an MLflow run that has the job's name as its tag `holdfast.job`."""

    def __init__(self, job: Job, experiment: str = "holdfast", tracking_uri: str = "") -> None:
        """Check that the package is there. UserError."""
        try:
            from mlflow.tracking import MlflowClient  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise _make_missing_error("mlflow") from None
        super().__init__(job)
        self._make = lambda: MlflowClient(tracking_uri or None)
        self._experiment = experiment
        self._client: Any = None
        self._run_id = ""

    def log_step(self, index: int, numbers: Mapping[str, float]) -> None:
        if self._client is None:
            self._client = self._make()
            self._run_id = self._find_run()
        for name, number in numbers.items():
            self._client.log_metric(self._run_id, name, number, step=index)

    def log_incident(self, index: int, number: int, incident: Incident) -> None:
        self._client.log_metric(self._run_id, "holdfast/incidents", number, step=index)
        self._client.set_tag(self._run_id, f"holdfast.incident.{number}", describe_ended(incident))

    def _find_run(self) -> str:
        """Return the id of the job's run, which is made if there is none."""
        client, name = self._client, name_of(self._job)
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else client.create_experiment(self._experiment)
        runs = client.search_runs([experiment], f"tags.`{TAG}` = '{name}'", max_results=1)
        run = runs[0] if runs else client.create_run(experiment, tags={TAG: name}, run_name=name)
        return str(run.info.run_id)


def _make_missing_error(package: str) -> UserError:
    return UserError(f"this tracker needs the Python package {package}: pip install {package}")
