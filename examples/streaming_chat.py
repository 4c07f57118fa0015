"""A chat of three turns, streamed; each turn reads only what is new: python examples/streaming_chat.py [MODEL.gguf]"""

import sys

from racer_local import Llama
from racer_local.models import fetch

llm = Llama(str(sys.argv[1] if len(sys.argv) > 1 else fetch("smollm2-135m")), n_ctx=2048, verbose=False)
messages = [{"role": "system", "content": "You answer in one or two short sentences."}]

for question in ("What is a river?", "And a lake?", "What do the two have in common?"):
    print(f"> {question}")
    messages.append({"role": "user", "content": question})
    said = ""
    for chunk in llm.create_chat_completion(messages, max_tokens=80, temperature=0, stream=True):
        piece = chunk["choices"][0]["delta"].get("content", "")
        print(piece, end="", flush=True)
        said += piece
    messages.append({"role": "assistant", "content": said})
    stats = llm.last_stats
    print(f"\n({stats['cached_tokens']} of {stats['prompt_tokens']} prompt tokens were still held)\n")
llm.close()
