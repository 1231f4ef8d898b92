"""A toy student and teacher that two CPU cores train in a minute or two, to watch distillation work.

`task` is the problem and its tokenizer, `pair` trains the models. Nothing of the training system is used here, and
nothing in it knows of the toy: what is written is an ordinary Hugging Face model directory and ordinary prompt files.
"""
