"""What can go wrong, as types. Every message is one line that says what to change."""


class RacerError(Exception):
    """Base of all errors of this package. The command line prints it as one line and exits with code 2."""


class ConfigError(RacerError, ValueError):
    """A setting is out of range or two settings contradict each other."""


class ModelError(RacerError):
    """A model file is missing, damaged, of the wrong kind, or can't be loaded with these settings."""


class DownloadError(RacerError):
    """A model could not be fetched from any of its sources, or what arrived is not what was promised."""


class CorpusError(ConfigError):
    """An index is missing, damaged, of a newer format or of another vocabulary; or the text for one is."""


class BindingError(RacerError):
    """llama-cpp-python can't be imported, or its build crashes on this CPU."""


class ExactnessError(ConfigError):
    """Plain decoding's ids can't be promised with a setting that the caller chose; the message names it."""


class ContextFullError(RacerError, ValueError):
    """A prompt or an answer does not fit into the context."""


class DecodeError(RacerError):
    """llama_decode failed; the message names its return code and the batch."""
