"""Makes the state again from pieces in the nodes' memory, when no worker has it any more."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from holdfast.engine.core.errors import Damaged, WorldError, first_line
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.ends import SourceKind
from holdfast.engine.core.redundancy import Recall, Redundancy
from holdfast.engine.core.views import View
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import GRADIENT, STATE
from holdfast.engine.state.memory.piece_reader import PieceReader
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.protection.protector import buffers_of_state
from holdfast.engine.train.step.kept_step import put_image
from holdfast.engine.train.step.step_data import StepData

PAUSE_S = 1.0  # time for nodes to report damaged pieces to the coordinator


class Recalling:
    """Recalls the state that a view names, for one worker's shard; `identity`: of this process."""

    def __init__(
        self,
        data: StepData,
        loaded: LoadedState,
        identity: PeerIdentity,
        redundancy: Redundancy,
        shard: int = 0,
    ) -> None:
        self._shard = shard
        self._data = data
        self._loaded = loaded
        self._identity = identity
        self._redundancy = redundancy
        self._reader: tuple[int, PieceReader] | None = None  # the view's number, and its reader
        self._began = 0.0
        self.news = ""  # describes the recalled state, once all of it is here

    def state(self, view: View, loading: Callable[[], None]) -> ev.StateObtained | ev.ObtainFailed:
        """Load the state from which a view begins; `loading` is called once it is all here.

        StateMismatch if the script cannot take it.
        """
        recall = self._recall_of(view)
        try:
            image = self._reader_for(view, recall).read(STATE, recall.view, recall.base)
            skeleton, tensors = buffers_of_state(image)
        except (WorldError, MemoryError, struct.error, RuntimeError, ValueError) as error:
            return self._make_failure(view, f"the state after {recall.base} steps", error)
        loading()
        self._loaded.load(skeleton, list(tensors))
        if not recall.sources:
            self._finish(recall)
        return ev.StateObtained(SourceKind.MEMORY, view.number)

    def step(self, view: View, step: int) -> ev.StepObtained | ev.ObtainFailed:
        """Put the gradient of a step where the script finds it."""
        recall = self._recall_of(view)
        source = next(each for each in recall.sources if each.first <= step < each.end)
        try:
            image = self._reader_for(view, recall).read(GRADIENT, source.view, step)
            put_image(self._data, image)
        except (WorldError, MemoryError) as error:
            return self._make_failure(view, f"the gradient of step {step}", error)
        if step + 1 == recall.step:
            self._finish(recall)
        return ev.StepObtained(SourceKind.MEMORY, view.number, step)

    def end(self) -> None:
        """Close the connections to all nodes."""
        if self._reader is not None:
            self._reader[1].close()
            self._reader = None

    def _finish(self, recall: Recall) -> None:
        if self._reader is not None and self._shard == 0:
            size, took_s = self._reader[1].received, time.monotonic() - self._began
            self.news = (
                f"the nodes' memory gave the state after {recall.base} steps and the gradients of "
                f"{recall.step - recall.base} more: {size / 1e6:.3g} MB to each process, in "
                f"{took_s:.2g} s"
            )
        self.end()

    def _reader_for(self, view: View, recall: Recall) -> PieceReader:
        if self._reader is None or self._reader[0] != view.number:
            self.end()
            self._began, self.news = time.monotonic(), ""
            reader = PieceReader(recall.nodes, self._identity, self._redundancy, self._shard)
            self._reader = view.number, reader
        return self._reader[1]

    def _make_failure(self, view: View, what: str, error: Exception) -> ev.ObtainFailed:
        self.end()
        time.sleep(PAUSE_S)
        text = f"{what} cannot be recalled: {first_line(error)}"
        return ev.ObtainFailed(SourceKind.MEMORY, view.number, text)

    @staticmethod
    def _recall_of(view: View) -> Recall:
        if view.recall is None:
            raise Damaged("this view recalls nothing")
        return view.recall
