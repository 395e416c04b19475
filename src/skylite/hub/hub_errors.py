"""Why the hub did not give a model or data set, and what to do, in words."""

from __future__ import annotations

from skylite.foreign_text import plain

LOGIN = "`hf auth login`, or set HF_TOKEN"


def explain_hub_error(name: str, error: Exception, noun: str) -> tuple[str, str]:
    """The reason and the remedy; the remedy is empty if only the alternatives of the caller help.

    Args:
        noun: "model" or "data set".
    """
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
    if isinstance(error, errors.LocalEntryNotFoundError) or _is_transport(cause):
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


def _is_transport(error: BaseException) -> bool:
    """An error of httpx, or of httpx2, which huggingface_hub uses since 2.0."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{plain(text).rstrip('.')}."
