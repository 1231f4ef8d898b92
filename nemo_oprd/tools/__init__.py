"""Programs beside training, imported by nothing of it: plan, doctor, rehearse, report, toy."""
