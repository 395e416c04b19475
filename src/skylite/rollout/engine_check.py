"""Ask the engines of engine.urls before a run whether they can serve it."""

from __future__ import annotations

import asyncio
import contextlib

from skylite.adapters.target_modules import last_names, predict_modules
from skylite.config.judge import BASE
from skylite.config.train import RunConfig
from skylite.data.chat_tokenizer import load_tokenizer, run_template
from skylite.engine.connections import readable_by_others
from skylite.engine.interface import ServerFacts
from skylite.engine.launchers import load_launcher
from skylite.engine.url_engines import check_url_engine, url_specs
from skylite.errors import ConfigError
from skylite.notes import Note, notes_of


def check_engines(run_config: RunConfig) -> list[Note]:
    """What the engines are. Nothing if the run starts its own.

    Raises ConfigError or ModelError for the first that does not answer or cannot serve the run.
    """
    config, resolved = run_config.config, run_config.resolved
    engine, model, adapters = config.engine, resolved.model, resolved.identity.lora_sync_path
    if not engine.urls:
        return []
    if model.max_images:
        raise ConfigError(
            "The prompts have images, which the engines of engine.urls do not get.",
            "Let skylite start the engines: leave out engine.urls.",
        )
    if config.has_judge and config.reward.judge.url == BASE and resolved.placement.device == "cpu":
        raise ConfigError(
            "reward.judge.url=base asks the base while adapters sample, and then a stock vLLM on a CPU "
            "answers with an adapter.",
            "Let skylite start the engines: leave out engine.urls. Or serve the judge by a URL of its own.",
        )
    launcher = load_launcher(config, resolved.trust.programs)
    specs = url_specs(run_config, last_names(predict_modules(model.path, config.lora)[1]))

    async def check_all() -> list[ServerFacts]:
        with contextlib.closing(load_tokenizer(model.path, run_template(run_config))) as tokenizer:
            checks = [check_url_engine(launcher, s, adapters, config.lora, tokenizer) for s in specs]
            return await asyncio.gather(*checks)

    facts = asyncio.run(check_all())
    unsafe = [readable_by_others("engine.urls", url, engine.key_env) for url in engine.urls]
    unsafe += [
        readable_by_others("engine.push_urls", url, engine.push_key_env, "adapters")
        for url in engine.push_urls
    ]
    return [*(note for found in facts for note in found.notes), *notes_of(*unsafe)]
