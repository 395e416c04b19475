"""Why the hub did not give a model or data set, and what to do, in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from skylite.untrusted_text import plain

Noun = Literal["model", "data set"]
LOGIN = "`hf auth login`, or set HF_TOKEN"


class HubRefusal(Exception):
    """The hub did not give something. `remedy` is empty if only the alternatives of the caller help."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


@contextmanager
def hub_refusals(name: str, noun: Noun) -> Iterator[None]:
    """Turn what the hub client raises in the block into HubRefusal."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        # InvalidURL: the client checks addresses only when it uses them.
        known = isinstance(error, HfHubHTTPError | OSError | ValueError) or _is_a(error, "InvalidURL")
        if not known and not _is_a(error, "TransportError"):
            raise
        raise HubRefusal(*_explained(name, error, noun)) from None


def _explained(name: str, error: Exception, noun: Noun) -> tuple[str, str]:
    from huggingface_hub import constants, errors, get_token

    page = f"{constants.ENDPOINT}/{'datasets/' if noun == 'data set' else ''}{name}"
    cause = _cause(error)
    if isinstance(cause, errors.GatedRepoError):
        if get_token() is None:
            return (
                "it is gated, and you are not logged in.",
                f"Accept its licence on {page}, then log in with {LOGIN}.",
            )
        return (
            "it is gated, and your token has no access to it.",
            f"Accept its licence on {page} with the account of your token, or use another token: {LOGIN}.",
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"the {noun} has no such revision.", ""
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"the hub has no public {noun} of that name.", f"Check the name. If it is private: {LOGIN}."
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and the local cache has no complete copy of the {noun}.", ""
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status == 401:
        return "the hub does not accept your token.", f"Log in again with {LOGIN}."
    if status is not None:
        return f"{constants.ENDPOINT} answered {status}, and the local cache has no complete copy.", ""
    if isinstance(error, errors.LocalEntryNotFoundError) or _is_a(cause, "TransportError"):
        return (
            f"{constants.ENDPOINT} cannot be reached ({type(cause).__name__}), and the local cache has no "
            f"complete copy of the {noun}.",
            "",
        )
    return _first_line(cause), ""


def _cause(error: Exception) -> BaseException:
    """The error behind huggingface_hub's "not in the cache" error."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    found: BaseException = error
    while isinstance(found, LocalEntryNotFoundError) and found.__cause__ is not None:
        found = found.__cause__
    return found


def _is_a(error: BaseException, name: str) -> bool:
    """Whether it is this error of httpx, or of httpx2, which huggingface_hub uses since 2.0."""
    return any(kind.__name__ == name for kind in type(error).__mro__)


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{plain(text).rstrip('.')}."
