"""Makes the consoles on which rich draws tables, bars and live pictures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from holdfast.engine.core.plain_text import fit


class PlainConsole(Console):
    """Escapes each text that rich draws; rich's own codes for colours and lines stay.

    Brackets and colons in a text have no meaning, unless a call asks for markup.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text, for example a cell of a table, in the form that rich draws."""
        return super().render_str(fit(text, self.encoding), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the parts of a drawing, with escaped texts."""
        if isinstance(renderable, Text) and (plain := fit(renderable.plain, self.encoding)):
            if plain != renderable.plain:  # before lines are broken, which depends on its length
                renderable = renderable.copy()
                renderable.plain = plain
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else fit(text, self.encoding), style, control)


class ScriptConsole(Console):
    """Shows the lines of a script, which stay as they are."""
