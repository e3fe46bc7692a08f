"""Secrets on the command line are refused and never repeated; names and paths that only resemble them are not."""

import pytest

from megalite.config.secrecy import secret_name, secret_override
from megalite.config.settings import SETTINGS
from tests.config.refusal import refusal

HEX = "0123456789abcdef0123456789abcdef01234567"

REFUSED = [
    ("wandb.api_key=CLISECRET", "CLISECRET"),
    ("+wandb.key=CLISECRET", "CLISECRET"),
    ("++log.password=CLISECRET", "CLISECRET"),
    ("HF_TOKEN=CLISECRET", "CLISECRET"),
    ("hf_token=CLISECRET", "CLISECRET"),
    ("data.credentials={user: a, pass: CLISECRET}", "CLISECRET"),
    ("aws_secret_access_key=CLISECRET(", "CLISECRET"),
    ("data.path={api_key: CLISECRET}", "CLISECRET"),
    ("data.path={api_key: CLISECRET", "CLISECRET"),
    ("--api-key=CLISECRET", "CLISECRET"),
    ("tokenizer=hf_AbCdEfGhIjKlMnOpQrStUvWx", "hf_AbCd"),
    ("tokenizer=hf_A1b2C3d4", "hf_A1b2"),
    ("tokenzier=hf_AbCdEfGhIjKlMnOpQrStUvWx", "hf_AbCd"),
    ("hf_AbCdEfGhIjKlMnOpQrStUvWx", "hf_AbCd"),
    ("hf_AbCdEfGhIjKlMnOpQrStUvWx=1", "hf_AbCd"),
    ("run_dir=sk-abcdefgh12345678", "sk-abc"),
    ("data.path=[a,sk-abcdefgh12345678]", "sk-abc"),
    (f"model.name={HEX}", HEX),
    (f"data.path=[{HEX},b]", HEX),
    (f"data.path='{HEX}'", HEX),
    ("data.path=https://me:CLISECRET@host/data.txt", "CLISECRET"),
]


@pytest.mark.parametrize(("text", "secret"), REFUSED, ids=[text for text, _ in REFUSED])
def test_a_secret_is_refused_and_not_repeated(text: str, secret: str) -> None:
    error = refusal(text, "data=text")
    said = str(error)
    assert secret not in said, said
    assert secret not in repr(error.problems)
    assert "secret" in said
    assert "environment" in said


def test_the_value_of_an_unknown_secret_flag_is_not_repeated() -> None:
    assert "CLISECRET" not in str(refusal("--api-key", "CLISECRET", "model=gtp2"))


def test_a_secret_that_comes_in_by_the_environment_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "hf_AbCdEfGhIjKlMnOpQrStUvWx")
    error = refusal("model.name=${oc.env:MY_VARIABLE}")
    assert "hf_AbCd" not in str(error)
    assert "looks like a secret" in str(error)


def test_no_setting_of_ours_is_taken_for_a_secret() -> None:
    assert not [name for name in SETTINGS if secret_name(name)]
    assert not any(secret_name(slip) for slip in ("tokeniser", "sample_token", "model.num_key_value_head"))


@pytest.mark.parametrize(
    "text",
    [
        f"tokenizer=cache/hub/models--gpt2/snapshots/{HEX}",
        "tokenizer=hf-internal-testing/tiny-random",
        "run_dir=runs/hf_import_of_gpt2",
        "run_dir=runs/risk-assessment-of-things",
        "model.name=sk-SK",
    ],
)
def test_what_only_resembles_a_secret_is_no_secret(text: str) -> None:
    assert not secret_override(text)
