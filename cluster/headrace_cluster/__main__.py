"""python -m headrace_cluster"""

from headrace_cluster.cli import main

if __name__ == "__main__":
    main()
