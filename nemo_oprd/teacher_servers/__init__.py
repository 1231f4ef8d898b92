"""A teacher behind vLLM servers: they compute its states, for which its ranks ask (docs/teacher_placement.md)."""
