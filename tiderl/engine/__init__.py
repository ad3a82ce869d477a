"""What an inference engine is; the vLLM engine; weight updates."""
