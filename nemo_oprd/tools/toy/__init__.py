"""A toy student and teacher that two CPU cores train in a minute or two, for trying distillation out.

`task` defines the problems and their tokenizer, `pair` trains the models. The toy does not use the training system, and
the training system has no code for the toy: the output is ordinary Hugging Face model directories and ordinary prompt
files.
"""
