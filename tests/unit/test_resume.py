"""Which folders may be resumed from."""

import os
from pathlib import Path

import pytest

from skyrl_qwen38 import resume
from skyrl_qwen38.overrides import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    step = tmp_path / "run" / "global_step_2"
    step.mkdir(parents=True)
    (step / "trainer_state.pt").write_bytes(b"")
    return step.parent


@pytest.mark.parametrize("mode", ["latest", "from_path"])
def test_an_own_folder_is_let_in(run, mode):
    resume.check_resume(mode, str(run), str(run / "global_step_2"))


@pytest.mark.parametrize("mode", [None, "none"])
def test_without_resuming_nothing_is_looked_at(mode):
    resume.check_resume(mode, "s3://bucket/run", None)


def test_a_first_start_has_no_folder_yet(tmp_path):
    resume.check_resume("latest", str(tmp_path / "new"), None)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` look like another user's, also through a link to it."""
    stat = Path.stat

    def foreign_stat(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        result = list(stat(self, follow_symlinks=follow_symlinks))
        if os.path.realpath(self) == str(path) if follow_symlinks else self == path:
            result[4] = os.getuid() + 1
        return os.stat_result(result)

    monkeypatch.setattr(Path, "stat", foreign_stat)


@pytest.mark.parametrize("foreign", ["run", "run/global_step_2", "run/global_step_2/trainer_state.pt"])
def test_a_folder_or_file_of_another_user_is_refused(run, foreign, monkeypatch):
    give_away(run.parent / foreign, monkeypatch)
    with pytest.raises(ConfigError, match=rf"trainer\.ckpt_path: .*{Path(foreign).name} belongs to user id"):
        resume.check_resume("latest", str(run), None)


def test_a_link_is_judged_by_what_it_leads_to(run, tmp_path, monkeypatch):
    outside = tmp_path / "outside.pt"
    outside.write_bytes(b"")
    (run / "global_step_2" / "data.pt").symlink_to(outside)
    resume.check_resume("latest", str(run), None)
    give_away(outside, monkeypatch)
    with pytest.raises(ConfigError, match=r"data\.pt belongs to user id"):
        resume.check_resume("latest", str(run), None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("lateast", "x", None), "trainer.resume_mode=lateast must be one of none, latest, from_path"),
        (("from_path", "x", None), "trainer.resume_mode=from_path needs trainer.resume_path"),
        (("from_path", "x", "/nowhere/global_step_1"), "trainer.resume_path=/nowhere/global_step_1 is not a folder"),
        (("latest", "s3://bucket/run", None), "trainer.ckpt_path=s3://bucket/run: the owner of files in the cloud"),
    ],
)
def test_wrong_settings_are_one_sentence(arguments, sentence):
    with pytest.raises(ConfigError) as error:
        resume.check_resume(*arguments)
    assert str(error.value).startswith(sentence)
