"""Write data.jsonl: 300 short lists of numbers to sort.

python make_data.py > data.jsonl
"""

import json
import random

rng = random.Random(0)
for _ in range(300):
    numbers = rng.sample(range(10), rng.randint(3, 5))
    question = f"Sort these numbers, smallest first: {' '.join(map(str, numbers))}"
    print(json.dumps({"question": question, "answer": " ".join(map(str, sorted(numbers)))}))
