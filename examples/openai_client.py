"""The openai client against a local server: a stream, a JSON schema, and what the drafts brought.

racer-local serve -m smollm2-135m      # in another terminal, until it says that the model is loaded
pip install openai
python examples/openai_client.py
"""

from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    client = OpenAI(base_url="http://localhost:8080/v1", api_key="none")
    model = client.models.list().data[0].id

    messages = [{"role": "user", "content": "Count from one to twenty."}]
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=100, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print(f"\n{chunk.model_extra['racer']}\n")

    messages = [{"role": "user", "content": "Tom is 31 years old. Who is it?"}]
    answer = client.chat.completions.parse(model=model, messages=messages, response_format=Person)
    print(answer.choices[0].message.parsed)


if __name__ == "__main__":
    main()
