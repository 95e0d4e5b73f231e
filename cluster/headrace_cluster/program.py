"""How the command line was called: hints repeat it, so that they can be copied and run."""

import os
import sys
from pathlib import Path

VARIABLE = "HEADRACE_COMMAND"  # set by ./headrace to the path under which it was called


def program_name() -> str:
    """'./headrace' in a checkout, 'headrace' where it is installed."""
    return os.environ.get(VARIABLE, "") or ("headrace" if Path(sys.argv[0]).name == "headrace" else "./headrace")
