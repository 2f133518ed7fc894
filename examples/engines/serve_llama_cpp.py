"""Serves a Llama or a Qwen 2 by llama.cpp, in float32: `serve_llama_cpp.py PORT ROWS THREADS TARGET [DRAFT]`."""

import sys
import time

import run_llama_cpp
import xllamacpp

COLUMNS = 1024  # tokens of a row


def main() -> None:
    port, rows, threads = map(int, sys.argv[1:4])
    params = run_llama_cpp.settings(sys.argv[4], threads)
    params.n_parallel, params.n_ctx, params.port = rows, rows * COLUMNS, port
    if sys.argv[5:]:
        run_llama_cpp.speculate(params, sys.argv[5], 4, threads)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
