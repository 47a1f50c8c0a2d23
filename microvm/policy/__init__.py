"""Pure decisions: `decide(state, event, now) -> (state, effects)`, one module per question.

No await, clock, randomness, path or log in here: `fleet` gathers the facts, asks, runs the effects, and feeds
every completion and failure back as an event. States and effects are frozen dataclasses; a denial is a value.
"""
