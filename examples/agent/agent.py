"""An agent on the openai package: it answers, and is asked twice to think again."""

import json
import os

import openai

task = json.loads(os.environ["SKYLITE_TASK"])
client = openai.OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages, letters = task["messages"], 0.0
for _ in range(3):
    reply = client.chat.completions.create(model="gpt-4o", messages=messages).choices[0].message
    text = reply.content or ""
    letters += sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text))
    messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "Are you sure?"}]
print(json.dumps({"letters": letters / 3, "right": float(task["answer"] in text)}))
