"""No token or key leaves in a log, a plan or an error."""

import pytest
from exl3_host.redact import MASK, looks_secret, redact, redact_text

HF = "hf_AbCdEfGhIjKlMnOpQr"


@pytest.mark.parametrize(
    "text",
    [
        f"token is {HF}, really",
        f"HF_TOKEN={HF}",
        "vllm serve m --api-key s3cr3t-value",
        "vllm serve m --api-key=s3cr3t-value",
        "VLLM_API_KEY=s3cr3t-value vllm serve",
        "{'api_key': 's3cr3t-value', 'port': 8000}",
        '{"password": "s3cr3t-value"}',
        "Authorization: Bearer s3cr3t-value",
        "authorization: basic s3cr3t-value",
        "https://me:s3cr3t-value@example.org/simple",
        "key sk-s3cr3t-value-0123456789",
        "ghp_s3cr3tvalue0123456789abcdef",
    ],
)
def test_secrets_in_text(text: str) -> None:
    clean = redact_text(text)
    assert MASK in clean
    for secret in (HF, "s3cr3t"):
        assert secret not in clean
    assert redact_text(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 32, kv tokens: 46,603",
        "--max-num-batched-tokens 2048 --port 8000",
        "token count 17",
        "the api key file is /etc/exl3/key",
        "--tokenizer /models/x",
        "secrets: {api_key: true, hf_token: false}",
        "api_key_file: /run/exl3/key",
    ],
)
def test_harmless_text_stays(text: str) -> None:
    assert redact_text(text) == text


def test_known_values_are_masked_wherever_they_stand() -> None:
    text = redact_text("log: got 'plainword' from plainword-client", ("plainword", "abc"))
    assert "plainword" not in text
    assert redact_text("abc", ("abc",)) == "abc", "three letters would mask half of any log"


def test_nested_data() -> None:
    data = {
        "api_key": "one",
        "env": {"HF_TOKEN": "two", "HOME": "/root"},
        "argv": ["vllm", "--api-key", "three", "--port", "8000", f"--x={HF}"],
        "secrets": {"api_key": True, "hf_token": False},
        "api_key_file": "/run/key",
        "eos_token": "<|im_end|>",
        "max_tokens": 32,
        "tokens": 5,
    }
    clean = redact(data)
    assert clean["api_key"] == MASK
    assert clean["env"] == {"HF_TOKEN": MASK, "HOME": "/root"}
    assert clean["argv"] == ["vllm", "--api-key", MASK, "--port", "8000", f"--x={MASK}"]
    for key in ("secrets", "api_key_file", "eos_token", "max_tokens", "tokens"):
        assert clean[key] == data[key]
    assert data["api_key"] == "one", "the original is left alone"


def test_what_looks_like_a_secret() -> None:
    assert looks_secret(HF)
    assert not looks_secret("smollm2-135m-instruct")
    assert not looks_secret("a" * 40)
