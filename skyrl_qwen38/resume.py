"""Which folders may be resumed from: SkyRL unpickles what it resumes, so only what this user wrote is let in."""

import os
from pathlib import Path

from skyrl_qwen38.overrides import ConfigError

RESUME_MODES = ("none", "latest", "from_path")


def check_resume(resume_mode: str | None, ckpt_path: str, resume_path: str | None) -> None:
    """Check the folder that SkyRL would resume from, if there is one.

    Raises:
        ConfigError: the mode is unknown, the folder to resume from is missing or in the cloud, or something in it
            belongs to another user.
    """
    if resume_mode in (None, "none"):
        return
    if resume_mode not in RESUME_MODES:
        raise ConfigError(f"trainer.resume_mode={resume_mode} must be one of {', '.join(RESUME_MODES)}")
    setting, folder = ("trainer.ckpt_path", ckpt_path)
    if resume_mode == "from_path":
        if not resume_path:
            raise ConfigError("trainer.resume_mode=from_path needs trainer.resume_path=<folder>/global_step_<n>")
        setting, folder = ("trainer.resume_path", resume_path)
    if "://" in folder:
        raise ConfigError(
            f"{setting}={folder}: the owner of files in the cloud cannot be checked, and resuming unpickles them; copy "
            "the checkpoint to a local folder, or set trainer.resume_mode=none"
        )
    if not os.path.isdir(folder):
        if resume_mode == "from_path":
            raise ConfigError(f"{setting}={folder} is not a folder; name the global_step_<n> folder of a run")
        return  # nothing to resume: a first start
    _refuse_other_owners(Path(folder), setting)


def _refuse_other_owners(folder: Path, setting: str) -> None:
    me = os.getuid()
    for root, folders, files in os.walk(folder, followlinks=True):
        for path in (Path(root), *(Path(root, name) for name in (*folders, *files))):
            # stat, not lstat: a link is as trustworthy as what it leads to
            if path.exists() and (owner := path.stat().st_uid) != me:
                raise ConfigError(
                    f"{setting}: {path} belongs to user id {owner}, not to you ({me}), and resuming would unpickle it; "
                    "use a folder of your own, or set trainer.resume_mode=none"
                )
