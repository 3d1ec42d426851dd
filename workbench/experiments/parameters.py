"""Parameters that come as text."""


def read_counts(text: str, refusal: str) -> list[int]:
    """Whole numbers of at least 1 with commas between, each once. Raises ValueError that says `refusal`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= 1 for part in parts):
        raise ValueError(refusal)
    return list(dict.fromkeys(map(int, parts)))
