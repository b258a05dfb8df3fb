"""Call a diffumesh server through OpenAI's client: a completion, a stream, log-probabilities.

diffumesh serve &
python -m launch.docs.examples.openai_client http://127.0.0.1:8000
"""

from __future__ import annotations

import sys

import openai

PROMPT = "def is_even(number):\n"


def main(address: str) -> list[str]:
    """Print three answers, and return their texts."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")  # with --api_key_file: a key of that file
    model = client.models.list().data[0].id

    # Decoding parameters that OpenAI's API does not have are passed in extra_body.
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=32, seed=1, extra_body={"steps": 16})
    print(whole.choices[0].text)

    # A stream sends the text before the first mask, so blocks make it flow.
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=32, seed=1, stream=True, extra_body={"block_length": 8}
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    print("".join(pieces))

    scored = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, logprobs=0)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    print(list(zip(logprobs.tokens or [], logprobs.token_logprobs or [], strict=True)))
    return [whole.choices[0].text, "".join(pieces), scored.choices[0].text]


if __name__ == "__main__":
    main(sys.argv[1])
