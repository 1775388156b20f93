metadata description = 'An internal load balancer whose probe asks the listener of each VM whether it is in work. The VMs need another way out, such as a NAT gateway.'

@maxLength(80)
param name string
param location string = resourceGroup().location
param tags object = {}

@description('Resource id of the subnet of its address.')
param subnetId string

@description('The port that the application listens on, and the load balancer too.')
@minValue(1)
@maxValue(65534)
param port int

@description('The port of [in_service] of listen.')
@minValue(1)
@maxValue(65534)
param inServicePort int = 8084

@description('How many probes in a row, 5 s apart, must fail or succeed: more than a restart of listen takes, and at most leave_seconds.')
@minValue(3)
@maxValue(100)
param probeThreshold int = 3

var frontend = 'frontend'
var pool = 'vms'
var probe = 'in-service'
var ids = {
  frontend: resourceId('Microsoft.Network/loadBalancers/frontendIPConfigurations', name, frontend)
  pool: resourceId('Microsoft.Network/loadBalancers/backendAddressPools', name, pool)
  probe: resourceId('Microsoft.Network/loadBalancers/probes', name, probe)
}

resource loadBalancer 'Microsoft.Network/loadBalancers@2024-05-01' = {
  name: name
  location: location
  tags: tags
  sku: {
    name: 'Standard'
  }
  properties: {
    frontendIPConfigurations: [
      {
        name: frontend
        properties: {
          privateIPAllocationMethod: 'Dynamic'
          subnet: {
            id: subnetId
          }
        }
      }
    ]
    backendAddressPools: [
      {
        name: pool
      }
    ]
    probes: [
      {
        name: probe
        properties: {
          protocol: 'Http'
          port: inServicePort
          requestPath: '/in-service'
          intervalInSeconds: 5
          probeThreshold: probeThreshold
          noHealthyBackendsBehavior: 'AllProbedUp' // where all VMs leave at once, some may still answer
        }
      }
    ]
    loadBalancingRules: [
      {
        name: 'application'
        properties: {
          protocol: 'Tcp'
          frontendPort: port
          backendPort: port
          frontendIPConfiguration: {
            id: ids.frontend
          }
          backendAddressPool: {
            id: ids.pool
          }
          probe: {
            id: ids.probe
          }
          enableTcpReset: true
        }
      }
    ]
  }
}

@description('For backendPoolIds of scaleset.bicep, which then waits for the load balancer.')
output backendPoolId string = '${loadBalancer.id}/backendAddressPools/${pool}'
