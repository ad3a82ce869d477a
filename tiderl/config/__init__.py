"""Run configuration: YAML in, checked and frozen models out."""

from tiderl.config.load import dump_config, load_config
from tiderl.config.schema import RunConfig

__all__ = ["RunConfig", "dump_config", "load_config"]
