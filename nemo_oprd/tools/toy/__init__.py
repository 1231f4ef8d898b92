"""A toy student and teacher that two CPU cores train in a minute or two, for trying distillation out.

`pair.py` defines the problems and their tokenizer, and trains the models. The toy does not use the training system,
which has no code for the toy: the output is ordinary Hugging Face model directories and ordinary prompt
files.
"""
