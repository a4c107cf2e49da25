"""The exit codes of every command; supervisors and scripts rely on them."""

from typing import Final

EXIT_CLEAN: Final = 0
EXIT_FAILED: Final = 1
# Also what typer ends with when an option is wrong.
EXIT_USAGE: Final = 2
# EX_TEMPFAIL of sysexits.h: the next start continues with what was left.
EXIT_DRAIN_TIMED_OUT: Final = 75
