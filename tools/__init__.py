"""What develops the product and is no test: nobody installs or deploys it."""
