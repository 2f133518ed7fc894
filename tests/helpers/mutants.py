"""Mutants: plausible mistakes in the place of functions, each for a check that must notice it."""

import functools


def instead_of(owner, name: str):
    """
    Makes a mutant of a mistaken function. Called with `monkeypatch`, it puts the mistake in the place of `owner.name`,
    whose original is the first argument of the mistake.
    """

    def decorate(mistaken):
        @functools.wraps(mistaken)
        def mutant(monkeypatch):
            original = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *arguments, **options: mistaken(original, *arguments, **options))

        return mutant

    return decorate
