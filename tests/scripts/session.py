"""Runs the cells of a file one after the other in __main__, as the kernel of a notebook does.

Lines of `# %%` divide them. A cell's source is where inspect finds it, as IPython puts it there.
"""

import code
import linecache
import sys
from pathlib import Path

session = code.InteractiveInterpreter(vars(sys.modules["__main__"]))
for number, cell in enumerate(Path(sys.argv[1]).read_text().split("# %%\n")):
    name = f"<cell {number}>"
    linecache.cache[name] = len(cell), None, cell.splitlines(keepends=True), name
    session.runcode(compile(cell, name, "exec"))
