"""Makes the state again from pieces in the nodes' memory, when no worker has it any more."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from holdfast.engine.core.errors import Damaged, WorldError, first_line
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SourceKind
from holdfast.engine.core.redundancy import Recall, Redundancy
from holdfast.engine.core.types import Peer
from holdfast.engine.core.views import View
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import GRADIENT, STATE
from holdfast.engine.state.memory.piece_reader import PieceReader
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.state.replicator import buffers_of_state
from holdfast.engine.train.state.step_image import StepImage, put_images
from holdfast.engine.train.step.mover import Events, StateSource, ViewConnections
from holdfast.engine.train.step.step_data import StepData

PAUSE_S = 1.0  # time for nodes to report damaged pieces to the coordinator


class Recalling(StateSource):
    """Recalls the state that a view names, for the shard of process `me`.

    `identity`: of this process. `loading` is called once all of the state is here. `tell` posts an
    event.
    """

    def __init__(
        self,
        me: Peer,
        data: StepData,
        loaded: LoadedState,
        identity: PeerIdentity,
        redundancy: Redundancy,
        loading: Callable[[], None],
        tell: Callable[[ev.WorkerEvent], None],
    ) -> None:
        self._me = me
        self._data = data
        self._loaded = loaded
        self._identity = identity
        self._redundancy = redundancy
        self._loading = loading
        self._tell = tell
        self._reader: tuple[int, PieceReader] | None = None  # the view's number, and its reader
        self._began = 0.0

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Load the state from which a view begins. StateMismatch if the script cannot take it."""
        assert at is not None, "a state is recalled in a view"
        view, recall = at.view, self._recall_of(at.view)
        try:
            image = self._reader_for(view, recall).read(STATE, recall.view, recall.base)
            skeleton, tensors = buffers_of_state(image)
        except (WorldError, MemoryError, struct.error, RuntimeError, ValueError) as error:
            return self._make_failure(view, f"the state after {recall.base} steps", error)
        self._loading()
        self._loaded.load(skeleton, list(tensors))
        if not recall.sources:
            self._finish(view, recall)
        return (ev.StateObtained(SourceKind.MEMORY, view.number),)

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Put the gradient of a step where the script finds it."""
        assert at is not None, "a step is recalled in a view"
        view, step, recall = at.view, order.step, self._recall_of(at.view)
        source = next(each for each in recall.sources if each.first <= step < each.end)
        try:
            image = self._reader_for(view, recall).read(GRADIENT, source.view, step)
            put_images(self._data, [StepImage.decode(image)])
        except (WorldError, MemoryError) as error:
            return self._make_failure(view, f"the gradient of step {step}", error)
        if step + 1 == recall.step:
            self._finish(view, recall)
        return (ev.StepObtained(SourceKind.MEMORY, view.number, step),)

    def end(self) -> None:
        """Close the connections to all nodes."""
        if self._reader is not None:
            self._reader[1].close()
            self._reader = None

    def _finish(self, view: View, recall: Recall) -> None:
        """Hang up; the leader's first process describes the recall."""
        if self._reader is not None and self._me == Peer(view.leader, 0):
            size, took_s = self._reader[1].received, time.monotonic() - self._began
            text = (
                f"the nodes' memory gave the state after {recall.base} steps and the gradients of "
                f"{recall.step - recall.base} more: {size / 1e6:.3g} MB to each process, in "
                f"{took_s:.2g} s"
            )
            self._tell(ev.EventNoted("memory", text))
        self.end()

    def _reader_for(self, view: View, recall: Recall) -> PieceReader:
        if self._reader is None or self._reader[0] != view.number:
            self.end()
            self._began = time.monotonic()
            reader = PieceReader(recall.nodes, self._identity, self._redundancy, self._me.shard)
            self._reader = view.number, reader
        return self._reader[1]

    def _make_failure(self, view: View, what: str, error: Exception) -> Events:
        self.end()
        time.sleep(PAUSE_S)
        text = f"{what} cannot be recalled: {first_line(error)}"
        return (ev.ObtainFailed(SourceKind.MEMORY, view.number, text),)

    @staticmethod
    def _recall_of(view: View) -> Recall:
        if view.recall is None:
            raise Damaged("this view recalls nothing")
        return view.recall
