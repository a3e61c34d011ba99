"""Sleep and wake of live servers, measured and judged: times, memory, answers, speed."""
