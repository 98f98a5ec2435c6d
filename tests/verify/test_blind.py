"""Scripts by someone who knew neither the rules nor the gallery, and what is said of them now.

Each script of `blind` has one defect, which `answers.json` describes; those of `blind/right` have
none. Two people wrote them, the second those that begin with a letter. They were judged before
anything was changed for them; what is still not known stands here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.thorough
BLIND = Path(__file__).parent / "blind"
CODES = {
    "01_digits_mlp": "LS101",
    "02_two_tower": "LS311",
    "03_tiny_gpt": "LS205",
    "04_accumulate": "LS301",
    "05_gru_classifier": "LS302",
    "06_cnn_digits": "LS306",
    "07_self_distill": "LS309",
    "08_regression": "LS402",
    "09_cosine": "LS402",
    "11_mean_teacher": "LS304",
    "12_factorization": "LS406",
    "13_sparse_linear": "LS211",
    "14_clip_pairs": "LS207",
    "17_augment": "LS107",
    "19_spike_guard": "LS405",
    "20_tagger": "LS205",
    "22_gan": "LS106",
    "23_vae": "LS211",
    "21_bigram_chunks": "LS210",  # labels are lost where a document is cut: not known
    "24_sharded_adam": "LS312",
    "W02_schedule_len": "LS402",
    "W04_batchnorm": "LS306",
    "W05_class_weights": "LS212",
    "W06_fsdp_clip": "LS404",
    "W07_masked_mean": "LS205",
    "W08_clip_first": "LS404",
    "W09_denoise_seed": "LS308",
    "W10_mean_teacher": "LS304",
    "W11_pretrained": "LS405",
    "W12_training_loss": "LS302",
    "W13_manual_sum": "LS201",
    "W14_nosync_edge": "LS301",
    "W15_token_norm": "LS201",
    "W16_local_negatives": "LS208",
    "W17_gather_nograd": "LS202",
    "W18_temperature": "LS311",
}
LATER = {
    "10_lstm_lm": "LS404",
    "15_finetune": "LS303",
    "16_unfreeze": "LS303",
    "18_spot_check": "LS105",
    "R18_join": "LS304",  # right in the end: a rank that joined early is given the others' weights
    "W01_plateau_main": "LS402",
    "W03_unfreeze_late": "LS303",
    "W19_padded_sampler": "LS101",
    "W20_restore_best": "LS304",
}
"""They begin to differ after the first steps: with as many as the command compares."""


def test_all_scripts_have_their_place() -> None:
    assert {path.stem for path in BLIND.glob("*.py")} == CODES.keys() | LATER.keys()


@pytest.mark.parametrize("name", [*CODES, *LATER])
def test_a_defect_is_named_or_said_to_be_unknown(name: str, tmp_path: Path) -> None:
    script = Path(shutil.copy(BLIND / f"{name}.py", tmp_path / "train.py"))
    verdict = warm.verify(script, steps=50 if name in LATER else 3).as_json()
    assert verdict["verdict"] == "DIFFERENT"
    assert verdict["findings"][0]["code"] == {**CODES, **LATER}[name], verdict["findings"]


@pytest.mark.parametrize("script", sorted((BLIND / "right").glob("*.py")), ids=lambda p: p.stem)
def test_a_right_script_is_equal(script: Path, tmp_path: Path) -> None:
    verdict = warm.verify(Path(shutil.copy(script, tmp_path / "train.py"))).as_json()
    assert verdict["verdict"] == "EQUAL", verdict["findings"]
