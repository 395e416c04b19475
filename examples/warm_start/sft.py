"""Train a LoRA adapter on reference answers (SFT), as a start for reinforcement learning.

    python sft.py --model smollm2-135m --data prepared --out sft-adapter

The training is transformers and PEFT only: any plain LoRA folder that PEFT saves is a start for skylite.
"""

import argparse

import pyarrow.parquet as pq
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from skylite.hub.resolve import resolve_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--out", default="sft-adapter")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--lr", type=float, default=2e-4)
args = parser.parse_args()

folder = resolve_model(args.model).path  # a hub id, a folder, or smollm2-135m
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
lora = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
model = get_peft_model(base, lora)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
rows = pq.read_table(f"{args.data}/train.parquet").to_pylist()

for step in range(args.steps):
    row = rows[step % len(rows)]
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    answer = tokenizer(row["answer"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    labels = [-100] * len(prompt) + answer  # the loss is on the answer only
    loss = model(input_ids=torch.tensor([prompt + answer]), labels=torch.tensor([labels])).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.3f}")

model.save_pretrained(args.out)
