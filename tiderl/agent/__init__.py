"""What an agent is: chat rendering, token bridge, action parsing."""
