"""When a trainer puts its rollout engines to sleep, wakes them and hands them weights."""
