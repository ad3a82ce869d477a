"""TRL's side of `tiderl bench train`: a script that runs in TRL's own virtual environment.

Invariants: TRL's GRPOTrainer does everything but the episodes; the episodes use TideRL's own environment
and agent code, so that both sides see the same prompts token for token (checked); the metrics file has the
form of a run's `metrics.jsonl`, as far as the benchmark reads it.

Not imported by anything: it is started as a file, with the plan (`tiderl.bench.plan`) as its argument.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

SHARES = ("rollout", "training", "publishing", "waiting")


@dataclass
class Episode:
    """One conversation: `context` is everything so far, `mask` is 1 on sampled tokens behind the prompt."""

    env: Any
    chat: Any
    context: list[int]
    prompt_length: int
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0
    success: bool = False


class Clock:
    """Seconds of each share since training began; waiting is what no other share took."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds = dict.fromkeys(SHARES, 0.0)

    def snapshot(self) -> tuple[float, dict[str, float]]:
        wall = time.perf_counter() - self.began
        named = sum(self.seconds[name] for name in SHARES if name != "waiting")
        return wall, {**self.seconds, "waiting": max(0.0, wall - named)}


def borrow(packages: dict[str, str]) -> None:
    """Make TideRL's packages importable from where they are, and nothing else that lies beside them."""
    for name, folder in packages.items():
        place = Path(folder)
        spec = importlib.util.spec_from_file_location(
            name, place / "__init__.py", submodule_search_locations=[str(place)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder} is no package")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def load(target: str) -> Any:
    """What `module:name` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


class Episodes:
    """Plays the plan's episodes, a turn of all of them at a time, with `model.generate`."""

    def __init__(self, plan: dict[str, Any], clock: Clock) -> None:
        from tiderl.agent.chat import ChatAgent
        from tiderl.agent.tokenizer import load_tokenizer

        self.plan, self.clock = plan, clock
        self.agent = ChatAgent(
            load_tokenizer(plan["model"]),
            load(plan["format"])(),
            system=plan["system"],
            instructions=plan["instructions"],
        )
        self.last: dict[str, float] = {}

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: `prompts` are indices of the plan's tasks, each once for every member."""
        started = time.perf_counter()
        episodes = [self.begin(self.plan["tasks"][int(prompt)]) for prompt in prompts]
        running, turns = episodes, 0
        while running:
            replies = self.generate(trainer, [episode.context for episode in running])
            running = [one for one, ids in zip(running, replies, strict=True) if self.goes_on(one, ids)]
            turns += 1
        for episode in episodes:
            episode.env.close()
        self.last = {
            "episodes": len(episodes),
            "success": sum(e.success for e in episodes) / len(episodes),
            "reward": sum(e.reward for e in episodes) / len(episodes),
            "generated_tokens": sum(sum(e.mask) for e in episodes),
        }
        self.clock.seconds["rollout"] += time.perf_counter() - started
        return {
            "prompt_ids": [e.context[: e.prompt_length] for e in episodes],
            "completion_ids": [e.context[e.prompt_length :] for e in episodes],
            # TRL's own transformers path gives none either; it would only read them beside vLLM.
            "logprobs": None,
            "env_mask": [e.mask for e in episodes],
            "env_reward": [e.reward for e in episodes],
        }

    def begin(self, task: dict[str, Any]) -> Episode:
        """Reset an environment and render its prompt, which must be the one TideRL's side renders."""
        from tiderl.env.registry import make

        env = make(self.plan["env_id"], **self.plan["env_kwargs"])
        messages, _ = env.reset(seed=task["seed"], options={"task": task["id"], "split": self.plan["split"]})
        chat = self.agent.episode()
        ids = chat.start(messages, env.tools)
        if ids != task["prompt_ids"]:
            raise RuntimeError(f"the prompt of task {task['id']} is not the one of TideRL's side")
        return Episode(env, chat, list(ids), len(ids))

    def goes_on(self, episode: Episode, ids: list[int]) -> bool:
        """Play one reply; False when the episode is over."""
        episode.context += ids
        episode.mask += [1] * len(ids)
        stopped = ids[-1] in self.agent.stop_token_ids
        action = episode.chat.act(ids, "stop" if stopped else "length")
        messages, reward, terminated, truncated, info = episode.env.step(action)
        episode.reward += float(reward)
        episode.success |= bool(info.get("success", False))
        if terminated or truncated:
            return False
        delta = episode.chat.observe(messages)
        if delta.broke:
            raise RuntimeError("the chat template rewrites earlier turns: TRL cannot train such an episode")
        if len(episode.context) + len(delta.ids) >= self.plan["max_episode_tokens"]:
            return False
        episode.context += delta.ids
        episode.mask += [0] * len(delta.ids)
        return True

    def generate(self, trainer: Any, contexts: list[list[int]]) -> list[list[int]]:
        """One turn for all, padded on the left: the way GRPOTrainer itself calls `model.generate`."""
        import torch
        from trl.models import unwrap_model_for_generation

        width = max(map(len, contexts))
        pad = trainer.processing_class.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in contexts])
        attention = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in contexts])
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped, trainer.accelerator, generation_kwargs=trainer.generation_kwargs
            ) as model,
            torch.no_grad(),
        ):
            out = model.generate(
                input_ids=ids, attention_mask=attention, generation_config=trainer.generation_config
            )
        stops = set(self.agent.stop_token_ids)
        return [up_to_stop(row, stops) for row in out[:, width:].tolist()]


def up_to_stop(ids: list[int], stops: set[int]) -> list[int]:
    """`ids` without the padding that follows the first stop token."""
    for place, token in enumerate(ids):
        if token in stops:
            return ids[: place + 1]
    return ids


def env_reward(completions: list[Any], env_reward: list[float], **_: Any) -> list[float]:
    """TRL's reward function: what the environment gave."""
    return env_reward


def train(plan: dict[str, Any]) -> None:
    """All updates of the plan; one line of metrics after each."""
    import torch

    torch.set_num_threads(plan["threads"])
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = Clock()
    episodes = Episodes(plan, clock)
    metrics = Path(plan["folder"]) / "metrics.jsonl"

    class Steps(TrainerCallback):
        """Times the span of one update, and writes it down when the optimizer has stepped."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.began = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began, self.rollout = time.perf_counter(), clock.seconds["rollout"]

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            span = time.perf_counter() - self.began
            clock.seconds["training"] += span - (clock.seconds["rollout"] - self.rollout)
            wall, shares = clock.snapshot()
            row = {"update": state.global_step, "wall_s": wall, "shares_s": shares, **episodes.last}
            with metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")

    loss, lora = plan["loss"], plan["lora"]
    arguments = GRPOConfig(
        output_dir=str(Path(plan["folder"]) / "trl"),
        use_cpu=True,
        bf16=plan["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": plan["dtype"]},
        gradient_checkpointing=False,  # its default trades speed for memory that is not needed here
        seed=plan["seed"],
        max_steps=plan["updates"],
        per_device_train_batch_size=plan["group_size"],
        gradient_accumulation_steps=plan["groups"],
        num_generations=plan["group_size"],
        shuffle_dataset=False,
        max_completion_length=plan["max_turn_tokens"],
        temperature=plan["temperature"],
        top_p=plan["top_p"],
        generation_kwargs={"eos_token_id": list(episodes.agent.stop_token_ids)},
        learning_rate=plan["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=plan["warmup"],
        weight_decay=plan["weight_decay"],
        adam_beta1=plan["betas"][0],
        adam_beta2=plan["betas"][1],
        max_grad_norm=plan["max_grad_norm"],
        beta=loss["beta"],
        epsilon=loss["epsilon"],
        epsilon_high=loss["epsilon_high"],
        delta=loss["delta"],
        scale_rewards=loss["scale_rewards"],
        loss_type=loss["loss_type"],
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=plan["model"],
        reward_funcs=env_reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(plan["tasks"]))]),
        processing_class=AutoTokenizer.from_pretrained(plan["model"]),
        callbacks=[Steps()],
        rollout_func=episodes,
        peft_config=LoraConfig(
            r=lora["rank"],
            lora_alpha=lora["alpha"],
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        if lora
        else None,
    )
    trainer.train()


def main() -> None:
    """Read the plan, say what is installed here, train."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    borrow(plan["packages"])
    names = ("trl", "torch", "transformers", "peft", "accelerate", "numpy")
    versions = {name: version(name) for name in names}
    (Path(plan["folder"]) / "versions.json").write_text(json.dumps(versions))
    train(plan)


if __name__ == "__main__":
    main()
