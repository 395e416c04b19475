"""Uploads an export to the hub with huggingface_hub."""

from __future__ import annotations

import sys
from pathlib import Path

from skylite.errors import ConfigError, RunFailed
from skylite.hub.hub_client import without_hub_bars
from skylite.untrusted_text import plain

TOKEN_VARIABLE = "HF_TOKEN"


def check_push(repo: str) -> str:
    """The token for a push to `repo`. Raises ConfigError before any work if it cannot succeed."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in __all__

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(
            f"--push {repo} is not a repository name: {plain(str(error))}", "Use OWNER/NAME."
        ) from None
    if "/" not in repo:
        raise ConfigError(f"--push {repo} has no owner.", "Use OWNER/NAME.")
    token = get_token()
    if not token:
        raise ConfigError(
            f"--push needs a token of the hub, and {TOKEN_VARIABLE} is not set.",
            f"Set {TOKEN_VARIABLE} to a token that may write, or run `hf auth login`.",
        )
    return token


def push(folder: Path, repo: str, token: str, *, public: bool, message: str) -> str:
    """Create the repository if needed and upload the folder as one commit. Returns its address.

    Raises RunFailed; the folder stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=token)
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        with without_hub_bars():
            commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = {
            401: "the hub does not accept the token",
            403: "the token may not write there",
            404: "there is no such repository, or the token may not see it",
        }.get(status, f"the hub answered {status}")
        said = f" ({plain(error.server_message)})" if error.server_message else ""
        raise _failed(folder, repo, f"{reason}{said}") from None
    except _transport_errors() as error:
        raise _failed(folder, repo, f"{api.endpoint} cannot be reached ({type(error).__name__})") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise _failed(folder, repo, plain(str(error))[:300]) from None
    return str(commit.repo_url)


def _transport_errors() -> tuple[type[Exception], ...]:
    """Of the HTTP libraries that huggingface_hub may use: httpx up to 1.x, httpx2 since 2.0."""
    modules = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return tuple(module.TransportError for module in modules)


def _failed(folder: Path, repo: str, reason: str) -> RunFailed:
    return RunFailed(
        f"The push to {repo} failed: {reason}. The export is complete in {folder}.",
        f"Push it again with `hf upload {repo} {folder}`.",
    )
