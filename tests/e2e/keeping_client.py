"""A client process whose cuts let servers keep their prefix cache; a planted fault of vllm_faults.py."""

from nemo_oprd.vllm import client_main, sampling

if __name__ == "__main__":
    sampling.PAUSE_AND_CUT += "&clear_cache=false"
    client_main.main()
