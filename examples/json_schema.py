"""JSON by a schema; the grammar sees accepted tokens only: python examples/json_schema.py [MODEL.gguf]"""

import json
import sys

from racer_local import Llama
from racer_local.models import fetch

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 2,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            },
        }
    },
    "required": ["people"],
}

llm = Llama(str(sys.argv[1] if len(sys.argv) > 1 else fetch("smollm2-135m")), n_ctx=2048, verbose=False)
answer = llm.create_chat_completion(
    [{"role": "user", "content": "Make up three people with a name and an age. Answer as JSON."}],
    response_format={"type": "json_object", "schema": SCHEMA},
    max_tokens=400,
    temperature=0,
)
print(json.dumps(json.loads(answer["choices"][0]["message"]["content"]), indent=1, ensure_ascii=False))
print(llm.last_stats)
llm.close()
