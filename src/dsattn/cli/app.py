"""The commands put together."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App, CycloptsError

import dsattn
from dsattn.cli.doctor import doctor
from dsattn.cli.verify import verify
from dsattn.errors import BadInput

app = App(
    name="dsattn",
    help="Exact operators of DeepSeek sparse attention, and proof of what runs them.",
    version=dsattn.__version__,
    help_format="plaintext",
)
app.command(verify)
app.command(doctor)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; its exit code.

    Raises:
        BadInput: the arguments do not fit a command.
    """
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise BadInput("usage", fix=f"{' '.join(str(error).split())} `dsattn --help` lists what there is") from error
    # Help and the version give nothing back.
    return code if isinstance(code, int) else 0
