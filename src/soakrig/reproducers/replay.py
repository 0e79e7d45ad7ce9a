"""``replay``: what a run folder or a transcript holds, sent again and again. The load of a minimised reproducer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soakrig.errors import UsageError
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Way
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe
from soakrig.soak.transcript import Transcript, open_transcript

PATH = Parameter("path", "", "the folder or file that is sent, from its beginning again when it is through")


def read(options: LoadOptions) -> Transcript:
    """What is to be sent. Raises ``UsageError`` where there is nothing, or so many conversations do not fit it."""
    path = PATH.of(options)
    if not path:
        raise UsageError("replay needs to know what to send", remedy="--param path=FOLDER, a run's or a transcript.")
    if not Path(path).exists():
        raise UsageError(f"--param path={path}: there is no such file or folder", remedy="Give a run folder.")
    found = open_transcript(Path(path), places=options.conversations)
    if found.recorded.form == "mooncake":
        raise UsageError(f"{path} is a trace, which has times", remedy=f"soak run --transcript {path}")
    if found.parallel != options.conversations:
        raise UsageError(
            f"{path} holds {found.parallel} conversations and {options.conversations} are to be sent",
            remedy=f"--conversations {found.parallel}",
        )
    return found


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """The conversations, over and over. Raises as ``read``."""
    return read(options).conversations(probe, over_again=True)


def check(options: LoadOptions, way: Way) -> None:
    """Raises as ``read``."""
    read(options)


REPLAY = Reproducer(
    name="replay",
    summary="what a run folder or a transcript holds, sent over and over, byte for byte from a run folder",
    provokes="whatever it provoked when it was recorded: the fault that a run has seen, or that `soak repro minimize` "
    "has made small",
    seen="nowhere by itself: it is how a recorded load becomes the load of a bisect",
    costs="as many turns as are asked for, each as large as it was recorded",
    clean_means="that this load did not fault in so many turns; a fault that depends on what the engine had served "
    "before may need more of the record than was kept",
    signature=("Xid", "engine", "turn"),
    load=load,
    parameters=(PATH,),
    uses=("conversations",),
    check=check,
)
