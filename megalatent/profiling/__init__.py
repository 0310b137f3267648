"""What a pass costs on each pipeline stage: recording, reports, advice."""
