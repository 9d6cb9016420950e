"""The one exception tree.

OutpaceError                    anything this package reports to a user (exit code 1)
|-- UsageError                  the caller asked for something wrong (exit code 2)
|   |-- ConfigError             a setting is unknown, out of range or contradicts another
|   |-- ParameterError          a sampling parameter is invalid; `.parameter` names it
|   |-- ModelError              a checkpoint or tokenizer is missing, damaged or of an unknown kind
|   |-- PromptError             the prompt is empty or malformed
|   |-- ContextOverflow         prompt plus output cannot fit; carries the numbers
|   `-- Unsupported             a combination that cannot work; never replaced by something else
|-- DownloadError               a source could not be fetched or failed its checksum (exit code 1)
|-- CapacityError               the request can never fit the memory given to it (exit code 1)
|-- ConstraintError             a request's constraint left no token to go on with (exit code 1)
`-- EngineDead                  the engine thread stopped; carries the cause (exit code 1)

Every message is one paragraph: what was wrong, where, and what to do about it.
"""


class OutpaceError(Exception):
    """Base of everything the package raises on purpose."""

    exit_code = 1


class UsageError(OutpaceError):
    """The caller can fix it by asking for something else."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, out of range, or contradicts another."""


class ParameterError(UsageError):
    """A sampling parameter is invalid. `parameter` is its field name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


class ModelError(UsageError):
    """A checkpoint or tokenizer is missing, damaged, or of a kind this package does not run."""


class PromptError(UsageError):
    """The prompt is empty, or contains token ids the model does not have."""


class ContextOverflow(UsageError):
    """Prompt and requested output exceed the context. The wording is the one clients search for."""

    def __init__(self, prompt_tokens: int, max_tokens: int, context: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context} tokens, but the request needs {prompt_tokens} prompt"
            f" tokens and up to {max_tokens} output tokens, which exceeds the available context size. Shorten the"
            " prompt, ask for fewer tokens, or raise the context limit if the model supports it."
        )
        self.prompt_tokens, self.max_tokens, self.context = prompt_tokens, max_tokens, context


class Unsupported(UsageError):
    """A combination of settings that cannot work together."""


class DownloadError(OutpaceError):
    """A file could not be fetched, or what arrived is not what was published."""


class CapacityError(OutpaceError):
    """The request can never fit the memory given to the KV store."""


class ConstraintError(OutpaceError):
    """The constraint on a request's output left no token to go on with. Only that request ends."""


class EngineDead(OutpaceError):
    """The engine stopped working; every open request receives this."""
