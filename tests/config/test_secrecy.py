"""Secrets on the command line are refused and never repeated; names and paths that only resemble them are not."""

import pytest

from megalite.config.overrides import secret_name, secret_override
from megalite.config.settings import SETTINGS
from tests.config.refusal import refusal

MIXED = "Ab0Cd1Ef2Gh3Ij4Kl5Mn6Op7Qr8St9Uv0Wx1Yz2A"
TOKEN = "AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh"
HEX = "0123456789abcdef0123456789abcdef01234567"

REFUSED = [
    ("wandb.api_key=CLISECRET", "CLISECRET"),
    ("HF_TOKEN=CLISECRET", "CLISECRET"),
    ("data.path={api_key: CLISECRET}", "CLISECRET"),
    ("--api-key=CLISECRET", "CLISECRET"),
    (f"tokenizer=hf_{TOKEN}", "hf_AbCd"),
    (f"run_dir=sk-{MIXED}", "sk-Ab0"),
    (f"data.path=[a,sk-proj-{MIXED[:20]}_x]", "sk-proj"),
    (f"model.name={HEX}", HEX),
    ("data.path=https://me:CLISECRET@host/data.txt", "CLISECRET"),
    *(
        (f"model.name={kind}{MIXED}", MIXED)  # put together here, so that nobody takes this file for a leak
        for kind in ("glpat-", "xoxb-", "ya29.", "AIza", f"eyJ{MIXED}.eyJ")
    ),
    ("model.name=ASIA0123456789ABCDEF", "IA0123456789ABCDEF"),
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
    monkeypatch.setenv("MY_VARIABLE", f"hf_{TOKEN}")
    error = refusal("model.name=${oc.env:MY_VARIABLE}")
    assert "hf_AbCd" not in str(error)
    assert "looks like a secret" in str(error)


@pytest.mark.parametrize("name", ["DB_PASSWORD", "DB_PASS", "'MY_TOKEN',x", "${oc.env:WHICH}"])
@pytest.mark.parametrize("colon", [":", " : "])
def test_a_variable_with_the_name_of_a_secret_is_not_resolved(
    name: str, colon: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("DB_PASSWORD", "DB_PASS", "MY_TOKEN"):
        monkeypatch.setenv(variable, "swordfish")
    monkeypatch.setenv("WHICH", "DB_PASSWORD")
    said = str(refusal(f'run_dir="runs/${{oc.env{colon}{name}}}"'))
    assert "looks like a secret" in said
    assert "swordfish" not in said


VARIABLES = "API_KEY APIKEY accessKeyId DB_PASS DBPASS2 SSHPASS MYSQL_PWD PGPASSWORD OAUTH AUTH_BEARER COOKIES"
NO_SECRETS = "KEYBOARD AUTHOR PASSAGE COMPASS PWD OLDPWD N_PASSES MAX_TOKENS COOKIECUTTER_CONFIG HOME"


def test_words_tell_the_names_of_secrets_and_no_setting_nor_slip_of_one_is_taken_for_one() -> None:
    assert [name for name in VARIABLES.split() if not secret_name(name)] == []
    slips = ("tokeniser", "sample_token", "model.num_key_value_head")
    assert [name for name in (*NO_SECRETS.split(), *SETTINGS, *slips) if secret_name(name)] == []


@pytest.mark.parametrize(
    "text",
    [
        f"tokenizer=cache/hub/models--gpt2/snapshots/{HEX}",
        "run_dir=runs/risk-assessment-of-things",
        "data.path=/data/hf_OpenWebText2",
        "run_dir=runs/sk-learn-experiment1",
        "log.wandb_name=Llama3BaselineLearningRateSweep3e4Seed01",
        "train.sample_prompts=['Secret: foo']",
    ],
)
def test_what_only_resembles_a_secret_is_no_secret(text: str) -> None:
    assert not secret_override(text)
