"""`tiderl eval`: run a policy on an environment and report its success.

Invariants: standard output carries the result alone (one line, or the summary with `--json`), all else goes
to standard error; whatever the user got wrong is said in one sentence before anything is written.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tiderl.errors import ConfigError
from tiderl.evaluation.journal import JOURNAL, read_journal
from tiderl.evaluation.plan import EvaluationPlan, default_out
from tiderl.evaluation.policies import parse_spec
from tiderl.evaluation.progress import Reporter, Silent, reporter_for
from tiderl.evaluation.result import EvaluationResult
from tiderl.evaluation.runner import always_raises, summary_path
from tiderl.evaluation.runner import evaluate as run_evaluation

INTERRUPTED = 130
NOTHING_VALID = 1
EPISODES = 100

POLICY_HELP = (
    "oracle, random, hf:FOLDER_OR_HUB_NAME, run:RUN_DIR, openai:BASE_URL#MODEL, "
    "or a plug-in's NAME[:ARGUMENT]"
)


def evaluate(
    env: Annotated[str, typer.Option("--env", "-e", help="An id of `tiderl env list`.")],
    policy: Annotated[str, typer.Option("--policy", "-p", help=POLICY_HELP, metavar="SPEC")],
    episodes: Annotated[
        int | None,
        typer.Option("--episodes", "-n", help="How many episodes.", show_default="100; run: the run's own"),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Which tasks.", show_default="test; run: the run's own")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of tasks' order, resets and sampling.", show_default="0; run: the run's own"),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Episodes at once.", show_default="the policy's choice")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy.", show_default="0; run: the run's own; openai: the server's"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest reply in tokens.", show_default="the policy's choice")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Action format of hf: and run:, such as hermes, lines, text.")
    ] = None,
    episode_timeout: Annotated[
        float | None, typer.Option(help="Seconds an episode may take.", show_default="the environment's")
    ] = None,
    env_arg: Annotated[
        list[str] | None,
        typer.Option("--env-arg", metavar="KEY=VALUE", help="Passed to the environment; can be repeated."),
    ] = None,
    policy_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--policy-arg",
            metavar="KEY=VALUE",
            help="Passed to the policy; can be repeated. hf: and run: know max_length, dtype, kv_tokens, "
            "max_sessions, system, instructions, threads; openai: deadline (seconds a reply may take).",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that hold environments.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results.", show_default="evals/ENV-POLICY")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume/--fresh", help="Keep what is in the folder and run the rest, or start over."),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")
    ] = False,
) -> None:
    """Run a policy on an environment and report its success with a 95 % interval.

    Examples:

      tiderl eval --env tide/Calculator-v0 --policy oracle --episodes 50

      tiderl eval --env tide/Calculator-v0 --policy run:runs/quickstart --episodes 200

      tiderl eval --env tide/Safe-v0 --policy openai:http://127.0.0.1:8000/v1#Qwen/Qwen3-8B -n 100

    An interrupted evaluation goes on where it stopped when the same command is run again; with a larger
    --episodes only the new ones are run. Episodes that infrastructure ended are in no mean and are run again.
    """
    plan = plan_of(
        env=env,
        policy=policy,
        episodes=episodes,
        split=split,
        seed=seed,
        concurrency=concurrency,
        temperature=temperature,
        max_tokens=max_tokens,
        format=format,
        episode_timeout=episode_timeout,
        env_arg=env_arg or [],
        policy_arg=policy_arg or [],
        workers=workers,
        out=out,
        resume=resume,
    )
    reporter: Reporter = (
        Silent() if as_json else reporter_for(f"{plan.env_id}, {plan.policy.partition(':')[0]}")
    )
    try:
        result = asyncio.run(run_evaluation(plan, reporter=reporter))
    except KeyboardInterrupt:
        typer.echo(interrupted(plan), err=True)
        raise typer.Exit(INTERRUPTED) from None
    report(result, as_json)
    if result.hopeless:
        raise always_raises(plan.env_id, f"each of {result.raised} episodes", result.episodes[-1])
    if not result.valid:
        raise typer.Exit(NOTHING_VALID)


def plan_of(
    *,
    env: str,
    policy: str,
    episodes: int | None,
    split: str | None,
    seed: int | None,
    env_arg: list[str],
    policy_arg: list[str],
    out: Path | None,
    **others: Any,
) -> EvaluationPlan:
    """The plan that the options mean. Raises ConfigError on a wrong one."""
    scheme, argument = parse_spec(policy)
    env_kwargs = parse_pairs("--env-arg", env_arg)
    policy_kwargs = parse_pairs("--policy-arg", policy_arg)
    defaults: dict[str, Any] = {"split": "test", "seed": 0, "episodes": None, "env_kwargs": {}}
    if scheme == "run":
        from tiderl.evaluation.run_folder import evaluation_defaults

        defaults |= evaluation_defaults(Path(argument), env)
    return EvaluationPlan(
        env_id=env,
        policy=policy,
        policy_kwargs=policy_kwargs,
        episodes=episodes if episodes is not None else defaults["episodes"] or EPISODES,
        split=split if split is not None else defaults["split"],
        seed=seed if seed is not None else defaults["seed"],
        env_kwargs=defaults["env_kwargs"] | env_kwargs,
        out=out if out is not None else default_out(env, policy),
        **others,
    )


def parse_pairs(option: str, pairs: list[str]) -> dict[str, Any]:
    """`["size=4", "words=[a, b]"]` -> {"size": 4, "words": ["a", "b"]}; values are YAML."""
    import yaml

    found: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise ConfigError(f"{option} {pair!r} is not KEY=VALUE", fix=f"write it like {option} size=4")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"the value of {option} {pair!r} is not YAML", fix="put text with signs in quotes"
            ) from error
    return found


def interrupted(plan: EvaluationPlan) -> str:
    """What a person reads after Ctrl-C."""
    assert plan.out is not None
    done = len(read_journal(plan.out)) if (plan.out / JOURNAL).exists() else 0
    if not done:
        return "interrupted: no episode was finished"
    command = "the same command" if plan.resume else "the same command without --fresh"
    kept = f"{min(done, plan.episodes)} of {plan.episodes} episodes are kept in {plan.out}"
    return f"interrupted: {kept}; run {command} again to go on"


def report(result: EvaluationResult, as_json: bool) -> None:
    """Print the result."""
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
        return
    typer.echo(result.line())
    for text, count in result.errors.items() if not result.hopeless else ():
        typer.echo(f"{count} invalid: {text}", err=True)
    if result.raised and not result.hopeless:
        typer.echo(
            f"the environment's own code raised in {result.raised} of them: mend it (`tiderl env check "
            f"{result.env_id}` shows more), then run the same command again to repeat them",
            err=True,
        )
    elif result.invalid and not result.hopeless:
        if not result.valid:
            shows = f"`tiderl env check {result.env_id}` shows whether the environment is at fault"
            typer.echo(f"no episode was valid: {shows}", err=True)
        typer.echo("run the same command again to repeat the invalid episodes", err=True)
    if result.out is not None:
        typer.echo(f"written to {summary_path(Path(result.out))}", err=True)
