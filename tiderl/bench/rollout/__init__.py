"""`tiderl bench rollout`: named workloads under each scheduling policy, on the real engine."""
