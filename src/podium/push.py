"""`podium push`: the exported folder to the model hub, by huggingface_hub."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from podium.errors import InputError, PodiumError
from podium.export import export
from podium.model.hub import hub_is_reachable


class PushError(PodiumError):
    """The hub did not take what was sent."""


def push(target: str, name: str, *, merge: bool, step: int | None, private: bool, dry_run: bool) -> Iterator[str]:
    """Lines for people. Whether the hub would take it is asked before anything is exported."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"{name!r} is no name of a repository: {error}") from None
    if not dry_run and get_token() is None:
        raise InputError("no token of the model hub: `hf auth login`, or set HF_TOKEN; --dry-run needs none")
    if not dry_run and not hub_is_reachable():
        raise InputError("the model hub cannot be reached from here; `podium export` writes the same folder to disk")
    with tempfile.TemporaryDirectory(prefix="podium-push-") as scratch:
        folder = Path(scratch) / "model"
        made = export(target, folder, merge=merge, step=step)
        for file, size in made.files.items():
            yield f"{size:>14,}  {file}"
        if dry_run:
            yield f"nothing was sent; without --dry-run these {len(made.files)} files go to {name}"
            return
        api = HfApi()
        try:
            url = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=f"Trained by Podium: {made.kind}")
        except (HfHubHTTPError, HTTPError, OSError) as error:
            raise PushError(f"the hub refused {name}: {str(error).strip().splitlines()[0]}") from None
        yield f"pushed to {url}"
