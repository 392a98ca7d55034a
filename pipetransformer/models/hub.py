"""Looks once whether a model is on disk or on the hub, without torch.

The libraries ask again and again before they give up, in every process. The launcher asks first.
"""

from __future__ import annotations

from pathlib import Path

from pipetransformer import hub
from pipetransformer.errors import UserError

CONFIG = "config.json"
OFFLINE = (
    "Without network give model.name=<folder> with config.json and weights, or HF_HUB_OFFLINE=1 to use what was "
    "downloaded before"
)
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers that a later question may not get


def check_folder(name: str, remedy: str) -> None:
    """Raises :class:`UserError` where a local folder has no config.json."""
    if not (Path(name) / CONFIG).is_file():
        raise UserError(f"model.name={name} is a folder without {CONFIG}; {remedy}")


def check_repository(
    name: str, repository: str, file: str, timeout_s: float = hub.TIMEOUT_S, must_exist: bool = True
) -> None:
    """Asks the hub once for one file of a repository, unless the hub's cache has it.

    Args:
        name: What the user wrote as ``model.name``, for messages.
        repository: ``owner/name`` or ``name``, with ``@revision`` where one is wanted.
        file: Its path in the repository.
        timeout_s: Seconds to wait for the answer.
        must_exist: Refuse when the hub answers that there is no such file. Else only a silent hub is refused.

    Raises:
        UserError: The hub does not have it or cannot be reached.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, HFValidationError

    repository, _, revision = repository.partition("@")
    try:
        if isinstance(try_to_load_from_cache(repository, file, revision=revision or None), str):
            return
        if constants.HF_HUB_OFFLINE:
            raise UserError(
                f"model.name={name} was not downloaded before, and HF_HUB_OFFLINE=1 keeps from asking the hub; unset "
                f"it, or give model.name=<folder> with {CONFIG} and weights"
            )
        url = hf_hub_url(repository, file, revision=revision or None)
        hub.ask(lambda: get_hf_file_metadata(url), timeout_s)
    except HFValidationError as error:
        raise UserError(f"model.name={name} is neither a folder nor a name on the hub") from error
    except GatedRepoError as error:
        raise UserError(
            f"model.name={name} is gated on the hub; accept its terms there and log in with 'hf auth login'"
        ) from error
    except EntryNotFoundError as error:
        if must_exist:
            raise UserError(f"model.name={name} is on the hub, but has no {file}") from error
    except HfHubHTTPError as error:
        _explain_status(name, error, must_exist)
    except UserError:
        raise
    except Exception as error:  # whatever the hub's client raises where nobody answers
        raise UserError(
            f"the hub does not say whether it has model.name={name} ({hub.reason(error)}). {OFFLINE}"
        ) from error


def has_file(repository: str, file: str, timeout_s: float = hub.TIMEOUT_S) -> bool:
    """Returns whether the hub's cache or, where it can be reached, the hub has a file of a repository."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    repository, _, revision = repository.partition("@")
    try:
        if isinstance(try_to_load_from_cache(repository, file, revision=revision or None), str):
            return True
        if constants.HF_HUB_OFFLINE:
            return False
        url = hf_hub_url(repository, file, revision=revision or None)
        hub.ask(lambda: get_hf_file_metadata(url), timeout_s)
    except Exception:  # no such file or repository, or nobody answers: the library that loads it tells which
        return False
    return True


def _explain_status(name: str, error: Exception, must_exist: bool) -> None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if must_exist and status not in _BUSY:  # a busy hub is left to the library, which asks again
        raise UserError(
            f"neither disk nor hub has model.name={name} (the hub answers {status}); give owner/name as on the hub, "
            f"log in with 'hf auth login' where it is private, or give model.name=<folder> with {CONFIG} and weights"
        ) from error
