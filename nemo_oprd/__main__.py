"""`python -m nemo_oprd` is the console script `nemo-oprd`."""

from nemo_oprd.cli import main

if __name__ == "__main__":
    main()
