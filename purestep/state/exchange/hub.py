"""The weights of a model on the Hugging Face Hub: its safetensors files, their index and its config, nothing else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from purestep.state.exchange.importing import PICKLES
from purestep.state.exchange.safetensors_sources import INDEX_SUFFIX
from purestep.state.files.manifest import CheckpointError

_CONFIG = "config.json"
_WHOLE = "model.safetensors"
_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_TOKEN = re.compile(r"hf_\w+")


@dataclass(frozen=True)
class HubFile:
    """A file of a model in one revision: the weights, or the index of them."""

    repo: str
    commit: str
    name: str


def is_hub_id(source: Any) -> bool:
    """Whether `source` may be the name of a model on the Hub: text like `name` or `org/name`."""
    return isinstance(source, str) and _ID.fullmatch(source) is not None and Path(source).suffix not in _FILES


_FILES = (".safetensors", ".json", *PICKLES)


def download(repo: str, *, revision: str | None = None, token: str | bool | None = None) -> HubFile:
    """See that the weights of a model are in this machine's cache, and say which they are.

    Without a connection what the cache has is taken, if that is all of them.

    Raises:
        CheckpointError: there is no such model or revision, or no access to it, or it has no safetensors; or it is not
            in the cache and the Hub cannot be reached. A token is in no message.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    with _explained(repo, revision, token):
        try:
            info = HfApi(token=token).model_info(repo, revision=revision)
        except Exception as error:
            if not _is_offline(error):
                raise
            return _cached(repo, revision)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        weights = _choose(repo, names)
        needed = {weights, *({_CONFIG} & set(names))}
        if weights.endswith(INDEX_SUFFIX):
            index = hf_hub_download(repo, weights, revision=info.sha, token=token)
            needed |= _listed(repo, Path(index)) & set(names)
        # The patterns are globs.
        patterns = [re.sub(r"([*?\[])", r"[\1]", name) for name in sorted(needed)]
        # By the name that was given, so that the cache can tell without a connection which commit it stands for.
        folder = snapshot_download(repo, revision=revision, token=token, allow_patterns=patterns)
    if Path(folder).name != info.sha:
        raise CheckpointError(f"{_shown(repo, revision)} on the Hub was changed during the download; start again")
    return HubFile(repo, info.sha, weights)


def locate(file: HubFile) -> Path | None:
    """Where the file is in this machine's cache; None if it, or a file that it lists, is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(file.repo, file.name, revision=file.commit)
    if not isinstance(found, str):
        return None
    path = Path(found)
    if file.name.endswith(INDEX_SUFFIX) and any(not (path.parent / name).exists() for name in _listed(file.repo, path)):
        return None
    return path


def _cached(repo: str, revision: str | None) -> HubFile:
    """What the cache has of the weights.

    Raises:
        CheckpointError: it does not have all.
    """
    from huggingface_hub import try_to_load_from_cache

    for probe in (_CONFIG, _WHOLE, f"model{INDEX_SUFFIX}"):
        found = try_to_load_from_cache(repo, probe, revision=revision)
        if isinstance(found, str):
            folder = Path(found).parent
            names = [name for name in os.listdir(folder) if name.endswith((".safetensors", INDEX_SUFFIX))]
            file = HubFile(repo, folder.name, _choose(repo, names)) if names else None
            if file is not None and locate(file) is not None:
                return file
    why = "HF_HUB_OFFLINE is set" if _set_offline() else "there is no connection to it"
    raise CheckpointError(
        f"the weights of {_shown(repo, revision)} are not (all) in the cache of this machine, and cannot be downloaded "
        f"from the Hub: {why}. Download them where there is a connection (hf download {repo}), or name a folder"
    )


def _choose(repo: str, names: Collection[str]) -> str:
    """Which of a model's files holds the weights, or lists those that do."""
    here = [name for name in names if "/" not in name]
    weights = [name for name in here if name.endswith(".safetensors")]
    for candidates in (
        [name for name in here if name == f"model{INDEX_SUFFIX}"],
        [name for name in here if name == _WHOLE],
        [name for name in here if name.endswith(INDEX_SUFFIX)],
        weights,
    ):
        if len(candidates) == 1:
            return candidates[0]
    if weights:
        raise CheckpointError(
            f"{repo} on the Hub has several safetensors files and no model.safetensors: {', '.join(sorted(weights))}; "
            "download the right one and name it"
        )
    pickles = [name for name in here if Path(name).suffix in PICKLES]
    raise CheckpointError(
        f"{repo} on the Hub has no safetensors files"
        + (f", only {pickles[0]}: pickles are not opened, since that runs what is in them" if pickles else "")
    )


def _listed(repo: str, index: Path) -> set[str]:
    """The files that an index names. What else is in it is looked at when it is opened."""
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{repo}: {index.name} is no index of safetensors files") from None


@contextmanager
def _explained(repo: str, revision: str | None, token: str | bool | None) -> Iterator[None]:
    """Turns what the hub's library raises into a `CheckpointError`. Nothing of a token or a header is passed on."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(_explanation(error, repo, revision, token)) from None


def _explanation(error: Exception, repo: str, revision: str | None, token: str | bool | None) -> str:
    from huggingface_hub import errors, get_token

    shown, has_token = _shown(repo, revision), bool(get_token() if token in (None, True) else token)
    log_in = "log in with `hf auth login`, set HF_TOKEN, or pass token="
    if isinstance(error, errors.GatedRepoError):
        access = "the account of the token that was used" if has_token else f"an account, and {log_in}"
        return f"{repo} on the Hub is gated: accept its terms at its page with {access}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} on the Hub has no revision {revision!r}; name a branch, a tag or a commit"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        access = "the token that was used has no access to it" if has_token else f"no token was given: {log_in}"
        return f"there is nothing at {repo} here, and on the Hub no such model, or it is private and {access}"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"{shown}: a token is asked for (token=True) and there is none: {log_in}"
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is neither a path here nor the name of a model on the Hub"
    if _is_offline(error):
        return f"the weights of {shown} cannot be downloaded: the connection to the Hub was lost"
    text = _TOKEN.sub("***", str(error).strip().partition("\n")[0])
    if isinstance(token, str) and token:
        text = text.replace(token, "***")
    return f"{shown}: the Hub's library failed with {type(error).__name__}: {text}"


def _is_offline(error: Exception) -> bool:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled | ConnectionError | TimeoutError):
        return True
    # The library of HTTP underneath: requests, httpx or httpx2, as releases went.
    names = {cls.__name__ for cls in type(error).__mro__ if cls.__module__.startswith(("httpx", "requests"))}
    return bool(names & {"TransportError", "ConnectionError", "Timeout"})


def _set_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _shown(repo: str, revision: str | None) -> str:
    return f"{repo} at revision {revision!r}" if revision else repo
